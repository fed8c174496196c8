"""``serve``: an OpenAI-compatible endpoint of versions of a run, which follows their names as these move.

Read in this order: ``split`` (which arm answers), ``folders`` and ``served_version`` (a version's model, and its
servers), ``arms`` (an arm changes its version, and no answer has two), ``keys`` and ``records`` (files), ``app`` and
``server`` (HTTP).
"""
