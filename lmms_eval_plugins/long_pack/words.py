"""Words for texts and pictures, and sentences built from them.

Names that questions ask for (`NAMES`, `SITES`, `FIRST_NAMES`, `LAST_NAMES`) never occur in filler sentences.
"""

from random import Random


def _words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    """Split a text at bars and line breaks."""
    return text.replace("\n", "|").split("|")


OPENINGS = _phrases("""In the morning|Before the rain|After a long winter|On the second day|Towards evening
Early in spring|At the end of the road|For a whole week|Once again|Without any hurry|As in every year|Not far away
Since last autumn|Under a grey sky|By the light of a lamp|To the surprise of all|Shortly after noon|In those years
Little by little|During the dry season""")
ADJECTIVES = _words("""quiet narrow wooden bright heavy distant careful early gentle hollow modest northern open
patient rapid rough silent simple slow small smooth southern steady sudden tall thin warm western wide young""")
NOUNS = _words("""baker bridge cart carpenter crowd farmer ferry field fisherman garden gardener gate hill kitchen
lantern market meadow musician neighbour orchard painter path road roof sailor school shepherd teacher tower
traveller village wagon wall window""")
DOINGS = _phrases("""waited for the others|was painted white|had been repaired|looked almost empty
seemed larger than before|was closed to visitors|came back into use|was covered with leaves|needed some new boards
drew little attention|was known to everyone|stood in deep shade|could be seen clearly|was left as it was
had changed very little|was measured with great care|gave shelter from the wind|was the talk of the town
belonged to nobody|moved a little further""")
WHERES = _phrases("""behind the old church|next to the river|at the edge of the forest|between two low hills
along the coast|close to the border|across the square|beside the long fence|near the southern shore
in the middle of the valley|above the first houses|below the steep slope|around the small lake
in front of the town hall|on the other side""")

NAMES = _words("""Avocet Bittern Bunting Curlew Dunlin Fulmar Gannet Godwit Goshawk Harrier Heron Jackdaw Kestrel
Kittiwake Lapwing Linnet Mallard Merlin Nightjar Oriole Osprey Pipit Plover Puffin Redstart Siskin Tanager Wagtail
Whimbrel Wigeon""")
SITES = _words("""archive brewery dockyard foundry greenhouse infirmary laboratory library monastery museum
observatory pavilion quarry refinery reservoir sanctuary sawmill tannery terminal warehouse""")
FIRST_NAMES = _words("""Adela Bruno Celia Dario Edith Felix Greta Hugo Irene Jonas Karin Lukas Mira Nils Olga Pavel
Quentin Rosa Stefan Tilda Ulrich Vera Walter Yvonne Zeno""")
LAST_NAMES = _words("""Abbot Barlow Castell Dorset Everly Fenwick Garrick Halden Ingram Jarvis Kendal Lowell Marsden
Norwood Ogilvie Penrose Quarles Radford Selwyn Thorne Upton Vickers Wexford Yardley""")
TITLES_FIRST = _words("""Annual Central Coastal Combined Eastern External Federal Final Former General Global Inland
Internal Joint Later Local Mutual National Natural Outer Partial Private Public Regional Remote Rural Seasonal
Shared Special Standard Upper Urban""")
TITLES_SECOND = _words("""Accounts Agreements Buildings Customs Deposits Elections Exports Facilities Fisheries
Forests Grants Harbours Imports Incomes Journeys Licences Machines Minerals Networks Obligations Pensions Permits
Prices Railways Records Reserves Salaries Shipments Supplies Tariffs Vessels Wages""")

Name = tuple[str, str]  # two words drawn together


def sentence(rng: Random) -> str:
    parts = (OPENINGS, ADJECTIVES, NOUNS, DOINGS, WHERES)
    opening, adjective, noun, doing, where = (rng.choice(part) for part in parts)
    return f"{opening} the {adjective} {noun} {doing} {where}."


def sentences(rng: Random, words: int) -> list[str]:
    """Draw sentences with at least `words` words in all."""
    found: list[str] = []
    while sum(len(each.split()) for each in found) < words:
        found.append(sentence(rng))
    return found


def pairs(rng: Random, first: list[str], second: list[str], count: int) -> list[Name]:
    """Draw `count` different pairs. Raises ValueError if there are fewer."""
    places = rng.sample(range(len(first) * len(second)), count)
    return [(first[place // len(second)], second[place % len(second)]) for place in places]
