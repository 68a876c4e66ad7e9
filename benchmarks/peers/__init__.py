"""The engines that mixfl is compared with, each with a worker in its own virtual environment."""
