"""Capitals, colours, the calendar."""

# fmt: off
# One entry is one line, and a list of words is a text: so they can be compared and edited.
from __future__ import annotations

__all__ = ("CAPITALS", "COLOURS", "DAYS", "MIXES", "MONTHS")

_CAPITALS = """
Afghanistan:Kabul Albania:Tirana Algeria:Algiers Andorra:Andorra_la_Vella Angola:Luanda Argentina:Buenos_Aires
Armenia:Yerevan Australia:Canberra Austria:Vienna Azerbaijan:Baku Bahrain:Manama Bangladesh:Dhaka Barbados:Bridgetown
Belarus:Minsk Belgium:Brussels Belize:Belmopan Benin:Porto-Novo Bhutan:Thimphu Botswana:Gaborone Brazil:Brasilia
Bulgaria:Sofia Burundi:Gitega Cambodia:Phnom_Penh Cameroon:Yaounde Canada:Ottawa Chad:N'Djamena Chile:Santiago
China:Beijing Colombia:Bogota Costa_Rica:San_Jose Croatia:Zagreb Cuba:Havana Cyprus:Nicosia
the_Czech_Republic:Prague Denmark:Copenhagen Djibouti:Djibouti Ecuador:Quito Egypt:Cairo El_Salvador:San_Salvador
Eritrea:Asmara Estonia:Tallinn Ethiopia:Addis_Ababa Fiji:Suva Finland:Helsinki France:Paris Gabon:Libreville
Gambia:Banjul Georgia:Tbilisi Germany:Berlin Ghana:Accra Greece:Athens Guatemala:Guatemala_City Guinea:Conakry
Guyana:Georgetown Haiti:Port-au-Prince Honduras:Tegucigalpa Hungary:Budapest Iceland:Reykjavik India:New_Delhi
Indonesia:Jakarta Iran:Tehran Iraq:Baghdad Ireland:Dublin Israel:Jerusalem Italy:Rome Jamaica:Kingston Japan:Tokyo
Jordan:Amman Kazakhstan:Astana Kenya:Nairobi Kuwait:Kuwait_City Kyrgyzstan:Bishkek Laos:Vientiane Latvia:Riga
Lebanon:Beirut Lesotho:Maseru Liberia:Monrovia Libya:Tripoli Liechtenstein:Vaduz Lithuania:Vilnius
Luxembourg:Luxembourg Madagascar:Antananarivo Malawi:Lilongwe Malaysia:Kuala_Lumpur Mali:Bamako Malta:Valletta
Mauritania:Nouakchott Mauritius:Port_Louis Mexico:Mexico_City Moldova:Chisinau Monaco:Monaco Mongolia:Ulaanbaatar
Montenegro:Podgorica Morocco:Rabat Mozambique:Maputo Namibia:Windhoek Nepal:Kathmandu the_Netherlands:Amsterdam
New_Zealand:Wellington Nicaragua:Managua Niger:Niamey Nigeria:Abuja North_Korea:Pyongyang North_Macedonia:Skopje
Norway:Oslo Oman:Muscat Pakistan:Islamabad Panama:Panama_City Paraguay:Asuncion Peru:Lima the_Philippines:Manila
Poland:Warsaw Portugal:Lisbon Qatar:Doha Romania:Bucharest Russia:Moscow Rwanda:Kigali Saudi_Arabia:Riyadh
Senegal:Dakar Serbia:Belgrade Sierra_Leone:Freetown Singapore:Singapore Slovakia:Bratislava Slovenia:Ljubljana
Somalia:Mogadishu South_Africa:Pretoria South_Korea:Seoul Spain:Madrid Sudan:Khartoum
Suriname:Paramaribo Sweden:Stockholm Switzerland:Bern Syria:Damascus Taiwan:Taipei Tajikistan:Dushanbe
Tanzania:Dodoma Thailand:Bangkok Togo:Lome Tunisia:Tunis Turkey:Ankara Turkmenistan:Ashgabat Uganda:Kampala
Ukraine:Kyiv the_United_Arab_Emirates:Abu_Dhabi the_United_Kingdom:London the_United_States:Washington,_D.C.
Uruguay:Montevideo Uzbekistan:Tashkent Venezuela:Caracas Vietnam:Hanoi Yemen:Sanaa Zambia:Lusaka Zimbabwe:Harare
Bolivia:Sucre Burkina_Faso:Ouagadougou Papua_New_Guinea:Port_Moresby the_Bahamas:Nassau Myanmar:Naypyidaw
the_Dominican_Republic:Santo_Domingo the_Maldives:Male Trinidad_and_Tobago:Port_of_Spain
Bosnia_and_Herzegovina:Sarajevo
"""

CAPITALS = dict(pair.replace("_", " ").split(":") for pair in _CAPITALS.split())

_COLOURS = """
grass:green the_sky:blue snow:white a_banana:yellow a_lemon:yellow blood:red coal:black a_carrot:orange
an_orange:orange milk:white chocolate:brown the_sun:yellow a_strawberry:red a_cherry:red a_frog:green
an_elephant:grey ash:grey a_crow:black a_raven:black a_flamingo:pink a_pig:pink spinach:green broccoli:green
a_lime:green a_cucumber:green a_blueberry:blue the_ocean:blue the_sea:blue salt:white sugar:white flour:white cotton:white
rice:white an_egg_yolk:yellow a_sunflower:yellow butter:yellow gold:yellow honey:golden silver:grey a_mouse:grey
a_pumpkin:orange a_tomato:red a_fire_engine:red a_ruby:red an_emerald:green a_sapphire:blue an_eggplant:purple
lavender:purple a_plum:purple a_violet:purple soil:brown wood:brown coffee:brown a_bear:brown a_polar_bear:white
a_swan:white a_leaf:green the_night_sky:black oil:black ink:black a_rose:red a_stop_sign:red a_lobster:red
moss:green a_pea:green sand:yellow ivory:white a_cloud:white rust:brown a_chestnut:brown a_canary:yellow
a_dolphin:grey a_crocodile:green lava:orange a_tree_trunk:brown jade:green a_daffodil:yellow a_pearl:white
"""

COLOURS = dict(pair.replace("_", " ").split(":") for pair in _COLOURS.split())

MIXES = {
    ("red", "yellow"): "orange", ("blue", "yellow"): "green", ("red", "blue"): "purple",
    ("red", "white"): "pink", ("black", "white"): "grey", ("blue", "white"): "light blue",
    ("red", "green"): "brown", ("black", "red"): "dark red", ("black", "blue"): "dark blue",
    ("green", "white"): "light green", ("black", "green"): "dark green", ("orange", "blue"): "brown",
}

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September",
          "October", "November", "December")
