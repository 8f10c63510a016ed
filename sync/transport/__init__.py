"""Ways for converted arrays to reach the rollout; one file a transport."""
