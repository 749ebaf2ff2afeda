"""Numba kernels behind `sparse-max`: gaps that count only elements of one magnitude class of the old value.

Class c holds the old values x with thresholds[c] <= x & keep < thresholds[c + 1]; thresholds ascend from 0. Arrays
have MAX_CLASSES entries whatever the number of classes: unused ones have the threshold `keep` + 1, out of reach.
"""

# pyright: reportCallIssue=false
from __future__ import annotations

import numpy as np
from numba import njit

from miles_disagg.weights.codecs.kernels import PIECE, add_value, digest
from miles_disagg.weights.codecs.vector import GROUP, at_least, count_bits, load, lowest_bit, nth_bit, width_of
from miles_disagg.weights.codecs.xxh3 import CHUNK

MAX_CLASSES = 6
_NEVER = 1 << 62
_jit = njit(nogil=True, cache=True, boundscheck=False)
_inline = njit(nogil=True, cache=True, boundscheck=False, inline="always")


@_inline
def _masks(address, elements, keep, thresholds, masks):
    """masks[c]: which of the up to 64 elements from `address` on belong to class c."""
    if elements == GROUP:
        above = ~np.uint64(0)
        for c in range(MAX_CLASSES - 1):
            higher = at_least(address, keep, thresholds[c + 1])
            masks[c] = above & ~higher
            above = higher
        masks[MAX_CLASSES - 1] = above
    else:
        masks[:] = 0
        for j in range(elements):
            value = load(address + np.uint64(j) * width_of(keep), keep) & keep
            masks[_class_of(value, thresholds)] |= np.uint64(1) << np.uint64(j)


@_inline
def _class_of(value, thresholds):
    c = 0
    for i in range(1, MAX_CLASSES):
        c += value >= thresholds[i]
    return c


@_jit
def class_gaps(old, elements, zero, keep, thresholds, positions, classes, gaps, counts):
    """Split ascending `positions` by class: the class (u1) and gap (u4) of each, in order, and changes per class."""
    width = width_of(zero)
    a = np.uint64(old)
    since = np.zeros(MAX_CLASSES, np.int64)  # elements of the class since its last change, this group included
    masks = np.zeros(MAX_CLASSES, np.uint64)
    i, n = 0, positions.size
    for at in range(0, elements, GROUP):
        _masks(a + np.uint64(at) * width, min(GROUP, elements - at), keep, thresholds, masks)
        for c in range(MAX_CLASSES):
            since[c] += count_bits(masks[c])
        while i < n and positions[i] < at + GROUP:
            c = _class_of(load(a + np.uint64(positions[i]) * width, zero) & keep, thresholds)
            left = count_bits(masks[c] >> np.uint64(positions[i] - at))  # this one and those after it
            classes[i], gaps[i] = c, since[c] - left
            since[c] = left - 1
            counts[c] += 1
            i += 1


@_jit
def sort_by_class(classes, starts, gaps, values, sorted_gaps, sorted_values):
    """Stable counting sort of gaps and values by class, class c from starts[c] on."""
    cursor = starts.copy()
    for i in range(classes.size):
        to = cursor[classes[i]]
        cursor[classes[i]] += 1
        sorted_gaps[to], sorted_values[to] = gaps[i], values[i]


@_jit
def apply_class_gaps(target, elements, zero, keep, thresholds, gaps, values, starts, counts, state, secret) -> int:
    """Undo `class_gaps`: add every value to its element; how many were found (fewer than all: a bad frame).

    gaps, values: class after class, class c from starts[c] on, counts[c] of them. Digests like `kernels.scan`.
    """
    width = np.int64(width_of(zero))
    a, n = np.uint64(target), 0
    chunks = max(elements * width - 1, 0) // CHUNK if state else 0
    cursor, ends = starts.copy(), starts + counts
    left = np.empty(MAX_CLASSES, np.int64)  # elements of the class to pass before its next change
    masks = np.zeros(MAX_CLASSES, np.uint64)
    for c in range(MAX_CLASSES):
        left[c] = gaps[cursor[c]] if counts[c] else _NEVER
    for begin in range(0, elements, PIECE // width):
        end = min(begin + PIECE // width, elements)
        for at in range(begin, end, GROUP):
            group = a + np.uint64(at * width)
            _masks(group, min(GROUP, elements - at), keep, thresholds, masks)
            due = np.uint64(0)
            for c in range(MAX_CLASSES):
                rest = left[c] - count_bits(masks[c])
                left[c] = rest
                due |= (np.uint64(rest) >> np.uint64(63)) << np.uint64(c)
            while due:
                c = lowest_bit(due)
                here, at_change = masks[c], cursor[c]
                index = nth_bit(here, left[c] + count_bits(here))
                add_value(group + np.uint64(index * width), values[at_change], zero)
                n += 1
                cursor[c] = at_change + 1
                rest = left[c] + 1 + gaps[at_change + 1] if at_change + 1 < ends[c] else _NEVER
                left[c] = rest
                due ^= np.uint64(rest >= 0) << np.uint64(c)
        digest(a, begin * width, min(chunks, end * width // CHUNK), state, secret)
    return n
