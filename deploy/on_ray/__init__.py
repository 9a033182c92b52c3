"""A run on the machines of a Ray cluster. Ray carries processes (which run where, and again when a machine is lost), never trajectories."""
