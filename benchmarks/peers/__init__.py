"""The engines that mixfl is compared with, each a worker in its own virtual environment."""
