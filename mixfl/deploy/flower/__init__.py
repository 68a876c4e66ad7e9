"""The same algorithms on Flower: the data really stays with clients (docs/flower.md).

The apps are made without JAX, which is imported when they get something to do.
"""

from mixfl.deploy.flower.apps import client_app, server_app
from mixfl.deploy.flower.simulated import simulated

__all__ = ["client_app", "server_app", "simulated"]
