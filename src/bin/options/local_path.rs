//! [`local_path`]: paths on the command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, TypedValueParser};
use pushpull::checkpoint::check_local_path;

/// Parses a path of this machine. A URL such as `s3://bucket/run` is refused by its scheme.
pub(crate) fn local_path() -> impl TypedValueParser<Value = PathBuf> {
    let check = |text: OsString| check_local_path(Path::new(&text)).map(Path::to_owned);
    OsStringValueParser::new().try_map(check)
}
