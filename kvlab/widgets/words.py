"""Every word that the labs say. Another language is another file with these names."""

from __future__ import annotations

POLICY = {"vllm": "vLLM", "sglang": "SGLang"}
TITLE = "Cache Lab"
SUBTITLE = "one model, the same requests, two caches"
ABOUT = "{model} · {device} · {dtype} · pool {pool:,} tokens"
RECORDED = "a recorded run of SmolLM2-135M"

TIMESTAMP = "Timestamp"
TIMESTAMPS = {
    "none": "none",
    "before": "before the shared part",
    "between": "before the question",
    "after": "after the question",
}
SHARED = "Shared part (tokens)"
QUESTION = "Question (tokens)"
ANSWER = "Answer (tokens)"
BLOCK_SIZE = "Block size (vLLM)"
PAGE_SIZE = "Page size (SGLang)"
RUN, STOP, START_OVER, RETRY = "Run", "Stop", "Start over", "Try again"
RUN_HELP = "Sends a request to both caches; two when the layout is new: one fills the cache, the next one reuses it"
STOP_HELP = "Ends the request under way"
START_OVER_HELP = "Empties both caches and forgets all requests"

LOADING = "A recorded run is shown until the model is there."
READY = "Ready. Press Run: the first request fills the caches, the second one reuses."
SENDING = "Request {number}, {policy}"
STOPPING = "Stopping after this step …"
STOPPED = "Stopped. The request under way was ended and its blocks are free; press Run to go on."
DONE = "Done. Press Run for one more request, or change the layout."
BUSY = "A request is under way: press Stop first, or wait."
NOT_READY = "The model is still being loaded: wait until it is ready."
DRAW_FAILED = "The pictures could not be drawn: {error}"
NOT_A_NUMBER = "{name} is {value!r}: it must be a whole number of at least {least}."
TOO_LONG = "The prompt and answer take about {asked:,} tokens, the pool has {pool:,}: shorten one of them."

RIBBON = "Which tokens of each prompt were reused ({policy})"
BLOCKS = "Every block of vLLM's pool"
TREE = "SGLang's radix tree"
SECONDS = "Seconds of prefill and decode, side by side"
