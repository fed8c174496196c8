"""The controller: admission by credits, evaluation, the end of the run."""
