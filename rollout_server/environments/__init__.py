"""What samples are played in: `interface` is what a plug-in is written against (docs/environments.md)."""
