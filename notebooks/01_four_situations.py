# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Four situations: what a prefix cache reuses, and what it does not
#
# *About 20 minutes.* On this page a real language model answers real requests, twice: once under the cache of **vLLM** and once
# under that of **SGLang**. You change where one short timestamp stands in the prompt, press **Run**, and see 1,000 tokens of
# work disappear, or not.

# %% [markdown]
# ## Five words
#
# - **Prefill.** The model reads the prompt. It computes two vectors for every token in every layer, a key and a value
#   (**K/V**), and keeps them: the *KV cache*. All tokens of the prompt are computed together.
# - **Decode.** The model writes the answer, one token a step. Each step computes K/V for one new token and reads all K/V before
#   it.
# - **Prefix.** The beginning that two prompts share, token by token from the very first. K/V of a token depend on all tokens
#   before it, so a prefix is the only part of a prompt that can be reused.
# - **Block.** vLLM keeps K/V in blocks of 16 tokens and finds *full* blocks again by a hash of everything up to their end.
# - **Page.** SGLang keeps K/V in pages, by default of 1 token, and finds them again by walking a tree of token sequences (a
#   *radix tree*).

# %% [markdown]
# ## Try it
#
# A prompt here is a help desk's handbook (1,000 tokens, always the same) and a question (40 tokens, a new one each time). Until
# the model is loaded you see a recorded run.
#
# 1. Leave **Timestamp** at *none* and press **Run**. The first request finds nothing and fills the cache; the second one
#    reuses.
# 2. Set **Timestamp** to *before the shared part* and press **Run**.
# 3. Set it to *before the question* and press **Run**.
# 4. Set it to *none*, **Answer** to 200, and press **Run**. Watch which of the two bars grows.

# %%
import kvlab

lab = kvlab.Lab()
lab

# %% [markdown]
# ## What you should have seen
#
# | situation | vLLM reuses | SGLang reuses | why |
# |:--|--:|--:|:--|
# | 1. the same 1,000 tokens first | 992 | 1,000 | the first 1,000 tokens are equal |
# | 2. a timestamp before them | 0 | 0 | the first token differs, and every key and every path covers all that stands before it |
# | 3. the timestamp between them and the question | 992 | 1,000 | the shared part begins the prompt again |
# | 4. as 1, with a long answer | 992 | 1,000 | only prefill shrinks; each token of the answer is decoded as before |

# %% [markdown]
# ## Why 992 and not 1,000?
#
# 1,000 = 62 blocks of 16 and 8 tokens left over. Those 8 share a block with the question, the question differs, so that block's
# hash differs: 62 × 16 = 992. SGLang compares token by token and stops exactly where the prompts part.
#
# Change **Shared part** to 1,008 and run again: 63 full blocks, and both reuse 1,008. Then try a **Block size** of 32, and a
# **Page size** of 64.

# %% [markdown]
# ## Why is the answer no faster?
#
# The second bar is decode. A cached prefix spares its computation, but each new token still reads all K/V before it, cached or
# not, and the model's weights besides. So the longer the answer, the smaller the share of the time that caching can save.

# %% [markdown]
# ## Questions to take along
#
# - A request id at the head of a system prompt: which situation is that?
# - Tool definitions that are sorted differently in each request?
# - Where would you put today's date, if the model has to know it?
