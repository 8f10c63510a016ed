"""Control messages between a trainer and its rollouts, over gRPC."""
