"""The classes of CelebAMask-HQ (Lee et al. 2020, arXiv:1907.11922), by index."""

CLASSES = (
    "background",
    "skin",
    "nose",
    "eye_g",  # glasses
    "l_eye",
    "r_eye",
    "l_brow",
    "r_brow",
    "l_ear",
    "r_ear",
    "mouth",  # its inside
    "u_lip",
    "l_lip",
    "hair",
    "hat",
    "ear_r",  # earrings
    "neck_l",  # necklace
    "neck",
    "cloth",
)
(
    BACKGROUND,
    SKIN,
    NOSE,
    GLASSES,
    L_EYE,
    R_EYE,
    L_BROW,
    R_BROW,
    L_EAR,
    R_EAR,
    MOUTH,
    U_LIP,
    L_LIP,
    HAIR,
    HAT,
    EARRING,
    NECKLACE,
    NECK,
    CLOTH,
) = range(len(CLASSES))
FLIP_PAIRS = ((L_EYE, R_EYE), (L_BROW, R_BROW), (L_EAR, R_EAR))
