"""Common English words, so that copying and refusing do not depend on rare ones."""

# fmt: off
# ruff: noqa: SIM905
# One entry is one line, and a list of words is a text: so they can be compared and edited.
from __future__ import annotations

__all__ = ("ADJECTIVES", "NOUNS", "PARAMS", "TOOL_VERBS")

NOUNS = tuple("""
account air album alarm animal apple arm army art article autumn baby bag ball band bank bar basket bath beach bed bell bench bike bill bird board boat body bone
border boss box boy branch brass bread brick bridge brother brush bucket bus bush business butter button cable camp cap car card care cart case castle cause
cellar chain chance change channel charge chart city class clay clerk cloth club coast coat coin college comfort company concert contact copper copy corn corner
cost country course court cover cow cream credit crew crime crop cross crowd cup current damage danger daughter debt design desk detail dinner dirt discount
disease distance dish doctor door dress drink drop dust duty ear earth edge education egg engine error estate event exam example exit expert eye face factory
fact family farm father fear feather field fight file film finger fire fish floor flower fly fog folder force forest form fruit fuel funds game garage garden
gas gate gift girl glass glove goal goat grain grass group guest guide guitar hair hall hammer hand harbour hat head health heart heat hill hole holiday home
hope horn horse hospital hotel hour house ice idea image income industry inn ink insect invoice iron island jar job jewel judge juice jump kettle kitchen knee
knife knot lake lamp land lane lawyer leaf leather leg lesson letter level library lift light limit line lip list lock log loss lunch machine mail manager map
mark market mass match meal meat member menu message metal method middle milk mill mind mine minute mirror mission money month moon morning mother motor mountain
mouth museum music nail name nation neck needle nerve net night noise nose note novel number nurse nut oak ocean offer office oil order owner package page paint
palace pan paper parcel parent park part partner party passenger path payment pen pencil person photo picture pipe place plan plane plant plate player pocket
point poison police pool port post pot potato powder price print prison prize process profit project property pump purse quality queen question queue quiz race
radio rail rain rate reason receipt recipe record report request result rice ring river road rock roof room root rope route rubber rule sail salary salad
salt sand schedule school science score screw sea season seat secret seed sense server shade shape share sheep shelf ship shirt shock shoe shop show side
sign silk silver singer sister size skill skin sky smoke snake snow soap society sock sofa soldier song sort sound soup space spade sport spring square stage stamp
star station steam steel stem stick stone stop store storm story street student sugar suit summer sun supply surface sweater system table tail talk task taste
tax taxi teacher team theory thing thread throat thumb thunder ticket tiger time tin title toe tomato tool tooth top tower town toy track trade train travel
tray tree trick trip trouble trousers truck tube tunnel turn twin umbrella uncle unit user valley value van vase verse vessel view village violin visit voice
wage wall war waste watch water wave wax way weather week weight wheel whip whistle wind window wine wing winter wire woman wood wool word work worm wound yard year
""".split())

ADJECTIVES = tuple("""
able acid angry bad bent best bitter blue boiling bright broken brown cheap clean clear cold common complex cool dark dead dear deep dry early easy elastic electric empty
equal false fast fat final first fixed flat free fresh full funny general good great green grey happy hard heavy high hollow hot kind large last late left light long
loose loud low married medical mixed modern narrow natural new noble normal old open orange past physical pink plain poor pretty private public purple quick quiet rare ready red
regular rich right ripe rough round royal sad safe second secret sharp short silent simple slow small smooth soft solid sour special spicy square steep sticky stiff
straight strange strong sudden sweet tall thick thin tight tired true velvet vintage violent warm wet white wide wild wise wooden wrong yellow young
""".split())

TOOL_VERBS = tuple("""
get find fetch read check show lookup list load track order cancel open close start stop delete rename print count buy sell rent book measure update create add remove
copy move share export import restart lock unlock scan assign approve reject archive restore schedule upload download
""".split())

PARAMS = tuple("""
name title code number city country street station stop line student user owner product item word topic color size kind type level room floor team player book author
date time day month year amount price weight language format target source label group model brand key tag host path file folder version region team_id order_id
""".split())
