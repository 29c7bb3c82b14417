"""Word lists that fill the slots of templates."""

# fmt: off
# ruff: noqa: SIM905
# One entry is one line, and a list of words is a text: so they can be compared and edited.
from __future__ import annotations

__all__ = ("CITIES", "FAMOUS", "FIRST_NAMES", "FOODS", "ITEMS", "JOBS", "SUBJECTS", "THINGS", "VERBS")

FIRST_NAMES = tuple("""
Ada Alan Alice Amir Anna Anton Aisha Ben Bella Bruno Carla Carlos Chloe Clara Daniel Diana Diego Elena Emil Emma Eric
Eva Fatima Felix Finn Frida Gina Grace Hana Hugo Ida Igor Ines Iris Ivan Jack Jamal Jane Jonas Julia Karim Kate Kenji
Lara Leo Lena Liam Linda Lucas Maria Marco Maya Mei Mia Milan Mona Nadia Nina Noah Nora Olga Omar Oscar Otto Paul Petra
Priya Rosa Ravi Robin Sam Sara Sofia Stefan Tara Tim Tom Uma Vera Victor Wang Wendy Yara Yusuf Zoe Peter Martin Laura
""".split())

CITIES = tuple(c.replace("_", " ") for c in """
Paris London Berlin Rome Madrid Tokyo Oslo Vienna Prague Lisbon Dublin Athens Cairo Nairobi Lima Boston Chicago Seattle
Austin Denver Miami Dallas Toronto Montreal Sydney Melbourne Mumbai Delhi Shanghai Osaka Kyoto Seoul Busan Manila
Hamburg Munich Cologne Milan Turin Naples Venice Lyon Nice Bordeaux Seville Valencia Porto Geneva Zurich Basel Antwerp
Ghent Rotterdam Utrecht Bergen Malmo Gdansk Krakow Brno Graz Split Dubai Doha Lagos Accra Dakar Cape_Town New_York
Los_Angeles San_Francisco Buenos_Aires Rio_de_Janeiro Mexico_City Hong_Kong Kuala_Lumpur Santiago Bogota Havana Warsaw
Budapest Helsinki Stockholm Copenhagen Brussels Amsterdam Istanbul Ankara Moscow Beijing Bangkok Hanoi Jakarta Singapore
""".split())

JOBS = tuple("""
teacher doctor nurse baker driver pilot engineer painter singer farmer lawyer cook gardener plumber student writer
dentist carpenter librarian waiter tailor sailor chemist designer programmer manager clerk butcher barber
""".split())

ITEMS = tuple("""
laptop chair table lamp phone book bicycle camera jacket watch backpack bottle keyboard mouse printer guitar tent sofa
mug umbrella wallet helmet scarf notebook pen desk carpet mirror kettle toaster blanket pillow drone tablet monitor
""".split())

FOODS = tuple("""
pancakes pizza lasagna bread soup curry sushi risotto salad cake cookies pasta tacos omelette stew dumplings noodles
pie waffles burgers hummus paella ramen cheesecake
""".split())

VERBS = tuple("""
repair buy sell paint clean fold build cook draw plant wash move cut measure tie sew grow train catch fix hang bake
melt polish sharpen store ship return lift tune knit iron frame
""".split())

SUBJECTS = tuple(s.replace("_", " ") for s in """
photosynthesis gravity the_moon black_holes dinosaurs volcanoes the_Roman_Empire democracy inflation jazz opera chess
football tennis basketball yoga the_stock_market bitcoin astrology philosophy poetry vampires dreams climate_change
vaccines viruses bacteria the_heart the_brain sleep vitamins protein cholesterol allergies wine cheese tea coffee_beans
sourdough gardening roses bees ants whales sharks penguins cats dogs horses knitting origami photography cinema ballet
architecture bridges steam_engines electric_cars airplanes rockets satellites Mars Jupiter the_Big_Bang atoms electrons
magnets lasers acids metals diamonds earthquakes tides rainbows hurricanes glaciers deserts rain_forests the_Amazon
the_Nile pyramids knights pirates Vikings the_Renaissance the_French_Revolution World_War_Two the_Cold_War slavery
elections taxes mortgages insurance pensions marriage religion Buddhism mythology Zeus Hamlet Harry_Potter Star_Wars
Batman Pokemon Minecraft the_Olympics the_World_Cup calculus algebra geometry topology prime_numbers pi statistics
Java JavaScript Rust Haskell SQL Docker Kubernetes Linux Windows React Django databases blockchain encryption WiFi
Bluetooth compilers regular_expressions HTML CSS git sorting_algorithms binary_trees evolution DNA genes cells proteins
enzymes hormones anxiety depression memory language grammar Latin Esperanto music_theory guitars pianos violins
fashion makeup tattoos diets fasting running swimming skiing surfing sailing fishing hunting camping hiking
""".split())

THINGS = tuple(s.replace("_", " ") for s in """
washing_machine toilet tire sink roof door window fence bathtub refrigerator oven car_engine shirt suit shoe garden
aquarium rabbit parrot kitten puppy wedding_cake birthday_party passport visa bank_account password router radio
television piano chimney lawn mower drill ladder tent canoe kite candle soap shelf curtain bookcase necklace website
resume novel poem song contract budget
""".split())

FAMOUS = tuple(s.replace("_", " ") for s in """
Albert_Einstein Isaac_Newton Marie_Curie Charles_Darwin Napoleon Julius_Caesar Cleopatra Shakespeare Mozart Beethoven Bach
Picasso Van_Gogh Michelangelo Plato Aristotle Socrates Gandhi Nelson_Mandela Abraham_Lincoln George_Washington
Barack_Obama Winston_Churchill Queen_Victoria Elvis_Presley Madonna Michael_Jackson Taylor_Swift Beyonce Bob_Dylan
Lionel_Messi Ronaldo Serena_Williams Roger_Federer Michael_Jordan Bill_Gates Steve_Jobs Elon_Musk Alan_Turing Galileo
Columbus Marco_Polo Neil_Armstrong Tolkien Agatha_Christie Charles_Dickens Jane_Austen Mark_Twain Hemingway Kafka
Tolstoy Homer Confucius Buddha Genghis_Khan Joan_of_Arc Frida_Kahlo Walt_Disney Charlie_Chaplin Tom_Hanks Spielberg
""".split())
