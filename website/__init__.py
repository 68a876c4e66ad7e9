"""The documentation site: what mkdocs.yml can't say (`make docs`). The pages are in docs/."""
