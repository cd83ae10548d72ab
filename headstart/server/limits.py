"""All limits of the server, in bytes, seconds and counts. Clients normally stay far below them."""

MiB = 2**20

# A connection.
HEADER_BYTES = 64 * 2**10  # request line and headers
NUM_HEADERS = 200
HEADER_SECONDS = 30.0  # from the connection, or the first byte, to the last header
BODY_PAUSE_SECONDS = 20.0  # between two pieces of a body
BODY_SECONDS = 300.0  # a whole body
DISCARD_SECONDS = 5.0  # the rest of a body that is too large
CLOSE_SECONDS = 2.0  # from the last byte to the end of a connection while the server shuts down
READ_SECONDS = 120.0  # maximum time for which a client may leave a response unread

# A body.
BODY_BYTES = 16 * MiB
LARGE_BODY = 64 * 2**10  # larger bodies are parsed and prepared in the "large" worker pool
SMALL_BUDGET = 64 * MiB  # the first LARGE_BODY bytes of all bodies being received or prepared, together
LARGE_BUDGET = 64 * MiB  # the remaining bytes of these bodies, together
VALUES = 600_000  # JSON values: a batch of prompts as token ids
MEMBERS = 50_000  # of all JSON objects
CONTAINERS = 50_000  # JSON lists and objects: an empty one takes a hundred times its two bytes in memory
DEPTH = 100  # nesting of JSON lists and objects

# Threads that prepare requests; more would only wait for each other.
SMALL_THREADS = 2
LARGE_THREADS = 1
GRAMMAR_THREADS = 48  # most wait for a sandbox process; GrammarLimits.waiting keeps some free for light constraints
ANSWER_THREADS = 2  # render large responses
TRIM_SECONDS = 10.0  # minimum time between two calls of malloc_trim

# Members of a request.
NAME = 512  # characters of names: model, role, user, ids
MESSAGES = 16_384  # messages, parts of one message, and documents
TOOLS = 1024
PROMPTS = 16_384
STOPS, STOP_LENGTH = 256, 1024  # stop strings, and the characters of one
LOGIT_BIAS = 4096
TOKEN_IDS = 4096  # stop_token_ids
CHOICES = 100_000
BAD_WORDS = 1024
PRIORITY = 2**31 - 1  # largest absolute value
DETOKENIZED = 2**17  # tokens of one /detokenize
IMAGES = 16  # images
IMAGE_BYTES = 12 * MiB  # of one image's file
IMAGE_URL = 2048  # characters of a URL
IMAGE_SECONDS = 10.0  # for downloading one image, redirects included
IMAGE_REDIRECTS = 3
PROMPT_LOGPROBS = 500_000  # logprobs of prompt tokens in one response

# An error.
MESSAGE = 600  # characters
QUOTED = 80  # characters of a user's value that an error message quotes


def shortened(text: str, most: int = QUOTED) -> str:
    """`text`, or its first `most` characters with its length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
