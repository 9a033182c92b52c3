"""The contract between Headrace's services, and the means to speak it."""

import os

# gRPC's handlers around fork crash the child where uvloop starts a process while calls run: of 800 processes 108 died of SIGSEGV before
# their first instruction. Nothing here lives on in a fork. It is read when grpc is imported, so each package imports this one first.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
