"""The server's outside: the Open Inference Protocol v2 over HTTP and gRPC, metrics, state. No decision is taken here."""
