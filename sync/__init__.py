"""What one job does to a whole model: trees, meshes, rounds, versions."""
