"""The algorithms deployed on Flower, where the data really stays with clients (docs/flower.md).

Making the apps needs no JAX. It is imported when a message arrives.
"""

from mixfl.deploy.flower.apps import client_app, server_app
from mixfl.deploy.flower.simulated import simulated

__all__ = ["client_app", "server_app", "simulated"]
