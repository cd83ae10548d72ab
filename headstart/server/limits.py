"""Every limit of the server in one place. Bytes, seconds, counts; far above what clients send, far below what hurts."""

MiB = 2**20

# A connection.
HEADER_BYTES = 64 * 2**10  # request line and headers
NUM_HEADERS = 200
HEADER_SECONDS = 30.0  # from the connection, or the first byte, to the last header
BODY_PAUSE_SECONDS = 20.0  # between two pieces of a body
BODY_SECONDS = 300.0  # a whole body
READ_SECONDS = 120.0  # how long a client may leave an answer unread

# A body.
BODY_BYTES = 16 * MiB
LARGE_BODY = 64 * 2**10  # beyond this a body is read and prepared in the pool for large ones
SMALL_BUDGET = 64 * MiB  # of all bodies being received or prepared: their first 64 KiB
LARGE_BUDGET = 64 * MiB  # and the rest of them
VALUES = 600_000  # JSON values: a batch of prompts as token ids
MEMBERS = 50_000  # of all JSON objects
CONTAINERS = 50_000  # JSON lists and objects: each costs a hundred times its two bytes
DEPTH = 100

# Threads that prepare requests; more would only wait for each other.
SMALL_THREADS = 2
LARGE_THREADS = 1
GRAMMAR_THREADS = 48  # most wait for another process; text/grammar_limits.py leaves some to those that need not
ANSWER_THREADS = 2
TRIM_SECONDS = 10.0  # between two times that freed memory is given back to the system

# Members of a request.
NAME = 512  # characters of names: model, role, user, ids
MESSAGES = 16_384  # also parts of one message
TOOLS = 1024
PROMPTS = 16_384
STOPS, STOP_LENGTH = 256, 1024
LOGIT_BIAS = 4096
TOKEN_IDS = 4096  # stop_token_ids
CHOICES = 100_000
BAD_WORDS = 1024
PRIORITY = 2**31 - 1
DETOKENIZED = 2**17
PROMPT_LOGPROBS = 500_000  # logprobs of prompt tokens in one answer

# An error.
MESSAGE = 600  # characters
QUOTED = 80  # characters of a user's value in it


def shortened(text: str, most: int = QUOTED) -> str:
    """`text`, or its beginning."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
