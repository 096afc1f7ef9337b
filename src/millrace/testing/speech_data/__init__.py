"""A small synthesised German speech set: `sentences.tsv` (who says what, in which split) and `clips.zip` (MP3).

Made by `tools/make_speech_clips.py` from sentences written for this project. The voices are synthetic: no person
was recorded. `millrace.demo.speech_data.write_common_voice` lays it out as Common Voice does.
"""
