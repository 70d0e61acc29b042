"""Every tolerance of the numeric tests, each with its reason. All are relative; the scale is named beside each.

Float32 rounds to 2**-24 = 6e-8. References are float64, so what is seen is the error of the code under test alone.
"""

from __future__ import annotations

# Against sum |w||x|, the scale on which a dot product can be wrong at all: 16 lanes, or parts of eight rows, give every
# output chains of under 70 additions, whose roundings mostly cancel.
DOT = 1e-6

# Against the largest |v| of a head: softmax weights carry the rounding of their scores (up to 30 in size here) and of
# the exponential (2 ulp), then a weighted sum.
ATTENTION = 5e-6

# The same where scores reach 1e4: a rounding of the score itself, 1e4 * 2**-24 = 6e-4, is a factor on its weight.
ATTENTION_LARGE_SCORES = 2e-3

# A handful of elementwise operations and one mean.
NORM = 1e-6

# Angles reach 1e4 radians; both sides take the float32 angle, so only sine, cosine and two products round.
ROTATION = 1e-6

# The exponential of the CPU kernels, as its docstring promises: 2 ulp.
EXP = 2 * 2.0**-23

# Attention probabilities summed over rows, against their largest value.
SCORES = 2e-6

# Logits of a tiny model, relative L2: float32 through three layers. The demand on the engine is 1e-3; a stricter bound
# finds a subtle mistake, such as one wrong row among many.
LOGITS = 2e-5

# Logits of a pretrained 30-layer model: its outlier channels (hundreds of times the rest) cost float32 two digits.
LOGITS_PRETRAINED = 1e-3

# Counted keep ratio against the requested one, in share of channels: one point.
KEEP_POINT = 0.01
