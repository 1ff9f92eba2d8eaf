"""Topics of encyclopedic articles, by words of their first paragraph."""

from __future__ import annotations

import re

# Words that tell a topic; an article needs three of them, more than of any other topic, or two and none of another.
WORDS = {
    "sport": "football footballer soccer baseball basketball tennis cricket cricketer hockey rugby "
    "olympic olympics championship athlete league coach tournament season team player quarterback "
    "midfielder goalkeeper golf cyclist",
    "politics": "politician election president senator parliament minister prime governor party "
    "democratic republican congress political legislature mayor diplomat chancellor campaign cabinet "
    "constituency senate",
    "science": "scientist scientific theory experiment laboratory researcher hypothesis research",
    "physics": "physics physicist quantum particle electron proton relativity thermodynamics magnetic "
    "photon neutron electromagnetic nuclear momentum",
    "chemistry": "chemistry chemist chemical compound molecule acid reaction element oxide polymer atomic ions organic",
    "biology": "biology species genus family organism bacteria protein cell genes evolution taxonomy "
    "enzyme plants fungus beetle subspecies mammal genetic organisms",
    "mathematics": "mathematics mathematician theorem algebra geometry equation integer topology "
    "polynomial matrix calculus mathematical",
    "astronomy": "astronomy astronomer planet star galaxy constellation orbit telescope comet asteroid "
    "moon solar crater",
    "health": "disease medicine medical patients symptoms treatment hospital doctor physician drug "
    "syndrome surgery infection cancer virus clinical diagnosis disorder",
    "computing": "computer software programming operating algorithm internet hardware processor microsoft "
    "data linux server code website programmer",
    "music": "album song singer band musician guitar composer opera orchestra jazz rapper songwriter "
    "singles recorded symphony chart billboard vocals",
    "film and television": "film television episode actor actress director series starring sitcom movie "
    "drama directed broadcast animated screenplay",
    "literature": "novel novelist poet poem author writer book literary poetry fiction published playwright stories",
    "art": "painter painting sculptor sculpture artist art gallery museum exhibition paintings portrait",
    "war and the military": "battle war army navy regiment military infantry soldier soldiers troops "
    "battleship cruiser destroyer brigade squadron commander warship naval torpedo",
    "religion": "church bishop catholic christian islam muslim buddhist hindu saint theology religious "
    "monastery temple pope gospel jewish judaism god",
    "law": "court law legal judge lawyer supreme justice statute attorney constitution plaintiff "
    "jurisdiction defendant",
    "business": "company business corporation businessman bank founded industry manufacturer retail "
    "products headquartered entrepreneur brand market revenue",
    "history": "century dynasty emperor king ancient medieval empire kingdom reign historian conquest",
    "geography": "river mountain lake island city town village county municipality region province "
    "population km district census coast",
    "transport": "railway station highway road route airport bridge train trains freeway interstate "
    "locomotive aircraft tram passenger",
    "weather": "hurricane storm tropical cyclone winds rainfall typhoon landfall depression",
    "food and cooking": "food dish cuisine cooking cooked sauce bread cheese wine beer meat vegetables "
    "flavor recipe rice soup dessert drink",
    "education": "university college school students campus faculty undergraduate academic education professor",
    "video games": "game games player gameplay nintendo playstation xbox arcade developed sega gamers console",
    "philosophy": "philosophy philosopher ethics metaphysics philosophical logic epistemology moral",
    "economics": "economics economist economic economy trade inflation currency tax monetary finance",
    "language": "language languages linguistics dialect speakers grammar spoken vowel alphabet consonant",
    "animals": "animal bird dog cat fish horse breed mammal whale snake bear bat shark frog predators nest feathers",
    "plants": "plant tree flower leaves shrub flowering fruit seeds herb orchid perennial",
}
TOPICS = {topic: frozenset(words.split()) for topic, words in WORDS.items()}
SCIENCES = frozenset("science physics chemistry biology mathematics astronomy health computing".split())

# Topics that an article may have besides its own: neither true nor false of it.
RELATED = [
    *({"science", topic} for topic in SCIENCES),
    *({topic, "education"} for topic in (*SCIENCES, "philosophy", "literature", "art", "language")),
    *({"history", topic} for topic in ("politics", "war and the military", "religion", "law", "geography", "art")),
    *({"history", topic} for topic in ("philosophy", "literature", "language", "economics", "education", "transport")),
    *({"biology", topic} for topic in ("animals", "plants", "health", "chemistry", "food and cooking")),
    *({"politics", topic} for topic in ("law", "economics", "war and the military", "geography", "religion")),
    *({"geography", topic} for topic in ("transport", "weather", "animals", "plants", "economics", "education")),
    *({"film and television", topic} for topic in ("literature", "art", "music", "video games", "business")),
    *({"business", topic} for topic in ("economics", "computing", "transport", "food and cooking", "law", "music")),
    *({"computing", topic} for topic in ("video games", "mathematics", "economics")),
    *({"war and the military", topic} for topic in ("transport", "geography", "law", "film and television")),
    {"physics", "chemistry"}, {"physics", "astronomy"}, {"physics", "mathematics"}, {"mathematics", "astronomy"},
    {"food and cooking", "plants"}, {"food and cooking", "animals"}, {"animals", "plants"}, {"art", "literature"},
    {"philosophy", "religion"}, {"philosophy", "literature"}, {"literature", "music"}, {"sport", "education"},
    {"health", "chemistry"}, {"literature", "video games"}, {"religion", "law"}, {"language", "literature"},
    {"language", "geography"}, {"sport", "video games"}, {"art", "music"}, {"religion", "art"},
    {"religion", "literature"},
]  # fmt: skip


def find_topic(text: str) -> str:
    """The topic of a text, "" if its words do not tell.

    >>> find_topic("A novel by an English author, a poet, set in the army.")
    'literature'
    """
    words = set(re.findall(r"[a-z]+", text.lower()))
    counts = sorted(((len(words & own), topic) for topic, own in TOPICS.items()), reverse=True)
    (most, topic), (second, _) = counts[:2]
    return topic if (most >= 3 and most > second) or (most == 2 and second == 0) else ""


def unrelated(topic: str) -> list[str]:
    """Topics that an article on a topic does not have."""
    return [other for other in TOPICS if other != topic and {other, topic} not in RELATED]
