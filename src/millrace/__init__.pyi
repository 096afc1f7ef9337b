from millrace._version import __version__ as __version__
from millrace.filesystem import MillraceFileSystem as MillraceFileSystem
from millrace.filesystem import filesystem as filesystem
