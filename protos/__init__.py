"""The contract between Headrace's services, and the means to speak it."""
