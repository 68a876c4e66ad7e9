"""What the paper proves: bounds on rounds and errors, limits of the learning rates."""
