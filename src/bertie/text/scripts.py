"""Character classes of scripts."""

import re

# Letters of scripts other than Latin, without symbols, emoji, phonetic and full-width letters.
OTHER_SCRIPT = re.compile(
    "[\u0370-\u1cff\u1f00-\u1fff\u2c00-\u2c5f\u2c80-\u2dff\u3040-\ua71f\ua800-\uab2f\uab70-\ud7ff"
    "\uf900-\ufaff\ufb13-\ufdff\ufe70-\ufefe\U00010000-\U0001cfff\U00020000-\U0003ffff]"
)
