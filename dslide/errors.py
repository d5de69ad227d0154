"""The one exception for mistakes of the person at the keyboard."""


class UserError(Exception):
    """Bad input, config or usage: the message names the file, line or key and the remedy; exit status 2."""
