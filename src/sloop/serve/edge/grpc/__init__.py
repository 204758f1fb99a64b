"""gRPC of an edge: connections are passed to the server of `grpcio`, whose methods answer as REST does."""
