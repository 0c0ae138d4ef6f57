"""The two ends of a run that are not a fault of titanlite's."""


class UserError(Exception):
    """The config, the data or a path is wrong. Exit code 2, the message alone, nothing created."""


class TrainingStopped(Exception):
    """Training could not go on: non-finite loss beyond the policy, data exhausted, disk full. Exit code 3."""
