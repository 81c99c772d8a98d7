"""What all parts of the library mean by a label."""

IGNORED = -100
"""The label of what does not count: a padded token, a node outside the training split."""
