# The mixfl command in a container:
#   docker build --build-arg VERSION=$(git describe --tags --always) -t mixfl .
#   docker run --rm --volume "$PWD:/work" mixfl run smile --preset demo --algorithm 2wgt --out runs/smile
FROM python:3.12-slim AS build
# The tag, since the image has no git; what is no version counts as the fallback in pyproject.toml.
ARG VERSION=
WORKDIR /source
COPY . .
RUN case "$VERSION" in *-*) ;; v[0-9]*) export SETUPTOOLS_SCM_PRETEND_VERSION="$VERSION" ;; esac; \
    pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY constraints.txt /tmp/constraints.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /tmp/constraints.txt /wheels/*.whl \
    && useradd --create-home --uid 1000 mixfl \
    && install --directory --owner mixfl /work
USER 1000
WORKDIR /work
ENTRYPOINT ["mixfl"]
CMD ["--help"]
