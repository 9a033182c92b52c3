"""What a judge said, as a number: verdicts and votes. Pure."""
