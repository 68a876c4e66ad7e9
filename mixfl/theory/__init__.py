"""The paper's bounds on rounds, errors and learning rates; predictions for measured problems."""
