from configparser import ConfigParser
from setuptools import setup
cfg = ConfigParser(); cfg.read('settings.ini', encoding='utf-8'); cfg = cfg['DEFAULT']
setup(install_requires=cfg['requirements'].split(), extras_require={k: cfg[f'{k}_requirements'].split() for k in ('dev','integrations','site','bench')})
