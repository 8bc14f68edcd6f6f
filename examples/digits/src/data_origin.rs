//! [`DataOrigin`]: the value of `--data`.

use std::error::Error;
use std::ffi::OsString;

use clap::builder::{OsStringValueParser, TypedValueParser};
use pushpull::training::data::StreamAddress;

use super::place::{self, Place};

/// The origin of the samples to train on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DataOrigin {
    /// IDX files in a directory or at a URL.
    Files(Place),
    /// A stream of records.
    Stream(StreamAddress),
}

/// Parses `-`, `unix:PATH`, `tcp:HOST:PORT`, a directory or a URL.
pub(crate) fn data_origin() -> impl TypedValueParser<Value = DataOrigin> {
    OsStringValueParser::new().try_map(parse)
}

fn parse(text: OsString) -> Result<DataOrigin, Box<dyn Error + Send + Sync>> {
    let is_stream = |text: &&str| {
        *text == "-" || ["unix:", "tcp:"].iter().any(|scheme| text.starts_with(scheme))
    };
    match text.to_str().filter(is_stream) {
        Some(address) => Ok(DataOrigin::Stream(address.parse()?)),
        None => Ok(DataOrigin::Files(place::parse(text)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_told_from_files() {
        let parsed = |text: &str| parse(text.into()).unwrap();
        assert_eq!(parsed("-"), DataOrigin::Stream(StreamAddress::Stdin));
        assert_eq!(parsed("unix:share"), DataOrigin::Stream(StreamAddress::Unix("share".into())));
        assert_eq!(parsed("tcp:[::1]:7"), DataOrigin::Stream(StreamAddress::Tcp("[::1]:7".into())));
        assert_eq!(parsed("./-"), DataOrigin::Files(Place::Directory("./-".into())));
        for text in ["unix:", "tcp:7", "ftp://b/run", ""] {
            assert!(parse(text.into()).is_err(), "{text}");
        }
    }
}
