"""What a problem is like: gradients, curvature, dissimilarity, costs. Measured by an engine."""
