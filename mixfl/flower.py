"""Deployments on Flower: `import mixfl.flower`, then `mixfl.flower.server_app(problem)`.

The code is in mixfl/deploy/flower; this is the name that projects use.
"""

from mixfl.deploy.flower import client_app, server_app, simulated

__all__ = ["client_app", "server_app", "simulated"]
