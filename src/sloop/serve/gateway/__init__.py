"""The server's outside: the Open Inference Protocol v2 over HTTP and gRPC, metrics, state.

No decision about a request is taken here: what comes in is checked and handed to a `RequestSink`, what ends is
answered.
"""
