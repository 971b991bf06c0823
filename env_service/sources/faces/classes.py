"""The classes of CelebAMask-HQ (Lee et al. 2020, arXiv:1907.11922)."""

from enum import IntEnum


class Part(IntEnum):
    """A part of a portrait, by the index of its class; its first name is the data set's."""

    background = 0
    skin = 1
    nose = 2
    eye_g = glasses = 3
    l_eye = 4
    r_eye = 5
    l_brow = 6
    r_brow = 7
    l_ear = 8
    r_ear = 9
    mouth = 10  # its inside
    u_lip = 11
    l_lip = 12
    hair = 13
    hat = 14
    ear_r = earring = 15
    neck_l = necklace = 16
    neck = 17
    cloth = 18


CLASSES = tuple(part.name for part in Part)
FLIP_PAIRS = ((Part.l_eye, Part.r_eye), (Part.l_brow, Part.r_brow), (Part.l_ear, Part.r_ear))
