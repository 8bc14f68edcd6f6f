//! [`Place`]: a directory on the command line, or the URL of one.

#![allow(dead_code, reason = "each program uses a part")]

use std::error::Error;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::builder::{OsStringValueParser, TypedValueParser};
use pushpull::checkpoint::{CheckpointStorage, LocalDirectory, StorageFault, check_local_path};
use thiserror::Error;

/// A place with checkpoints or data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A directory of this machine.
    Directory(PathBuf),
    /// A URL such as `s3://bucket/run`, in a program with the feature of its scheme.
    Url(String),
}

/// Parses a directory or a URL. A URL is refused unless the program has the feature of its scheme.
pub(crate) fn place() -> impl TypedValueParser<Value = Place> {
    OsStringValueParser::new().try_map(parse)
}

/// Parses what [`place`] does.
pub(crate) fn parse(text: OsString) -> Result<Place, Box<dyn Error + Send + Sync>> {
    if let Some(url) = text.to_str().filter(|text| has_remote_scheme(text)) {
        check_url(url)?;
        return Ok(Place::Url(url.to_owned()));
    }
    Ok(Place::Directory(check_local_path(Path::new(&text))?.to_owned()))
}

/// Returns whether a text begins with the scheme of a storage that some build of this program can
/// use.
fn has_remote_scheme(text: &str) -> bool {
    let scheme = text.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
    scheme.is_some_and(|scheme| ["s3", "gs", "az", "hdfs"].contains(&&*scheme))
}

#[cfg(feature = "remote")]
fn check_url(url: &str) -> Result<(), Box<dyn Error + Send + Sync>> {
    let parsed: pushpull::remote::RemoteUrl = url.parse()?;
    match parsed.scheme().is_built() {
        true => Ok(()),
        false => Err(not_built(url).into()),
    }
}

#[cfg(not(feature = "remote"))]
fn check_url(url: &str) -> Result<(), Box<dyn Error + Send + Sync>> {
    Err(not_built(url).into())
}

fn not_built(url: &str) -> String {
    let scheme = url.split_once("://").map_or(url, |(scheme, _)| scheme);
    let feature = scheme.to_ascii_lowercase();
    format!(
        "the scheme {scheme:?} of {url:?} is not supported by this program: build it with --features \
         {feature}, or mount the storage, and give the path where it is mounted"
    )
}

impl Place {
    /// Returns the directory, if it is one of this machine.
    pub(crate) fn directory(&self) -> Option<&Path> {
        match self {
            Place::Directory(path) => Some(path),
            Place::Url(_) => None,
        }
    }

    /// Opens the checkpoints at the place to read only.
    ///
    /// # Errors
    /// The error of the directory or of the storage.
    pub(crate) fn open_read_only(&self) -> Result<Arc<dyn CheckpointStorage>, PlaceError> {
        match self {
            Place::Directory(path) => Ok(Arc::new(LocalDirectory::open_read_only(path)?)),
            Place::Url(url) => open_url(url, Access::Read),
        }
    }

    /// Opens the place to save checkpoints there. Creates a directory.
    ///
    /// # Errors
    /// The error of the directory or of the storage.
    pub(crate) fn open(
        &self,
        group_writable: bool,
    ) -> Result<Arc<dyn CheckpointStorage>, PlaceError> {
        match self {
            Place::Directory(path) if group_writable => {
                Ok(Arc::new(LocalDirectory::create_for_group(path)?))
            }
            Place::Directory(path) => Ok(Arc::new(LocalDirectory::create(path)?)),
            Place::Url(url) => open_url(url, Access::Write),
        }
    }
}

/// The error of a place that cannot be opened.
#[derive(Debug, Error)]
pub(crate) enum PlaceError {
    /// The error of the directory.
    #[error(transparent)]
    Directory(#[from] StorageFault),
    /// The error of the URL or its storage.
    #[cfg(feature = "remote")]
    #[error(transparent)]
    Url(#[from] pushpull::remote::RemoteError),
    /// The program has no feature for URLs.
    #[cfg(not(feature = "remote"))]
    #[error("{0}")]
    NotBuilt(String),
}

#[derive(Clone, Copy)]
enum Access {
    Read,
    Write,
}

/// Opens the storage of a URL with the settings of the environment.
#[cfg(feature = "remote")]
fn open_url(url: &str, access: Access) -> Result<Arc<dyn CheckpointStorage>, PlaceError> {
    use pushpull::remote::{RemoteOptions, RemoteStorage};
    let options = RemoteOptions::from_lookup(|name| std::env::var(name).ok());
    Ok(Arc::new(match access {
        Access::Read => RemoteStorage::open_read_only(url, options)?,
        Access::Write => RemoteStorage::open(url, options)?,
    }))
}

#[cfg(not(feature = "remote"))]
fn open_url(url: &str, _access: Access) -> Result<Arc<dyn CheckpointStorage>, PlaceError> {
    Err(PlaceError::NotBuilt(not_built(url)))
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Directory(path) => path.display().fmt(f),
            Place::Url(url) => f.write_str(url),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_need_the_feature_of_their_scheme() {
        for scheme in ["s3", "gs", "az", "hdfs"] {
            let url = format!("{scheme}://bucket:9/run");
            match parse(url.clone().into()) {
                Ok(place) => {
                    assert_eq!((place, cfg!(feature = "remote")), (Place::Url(url), true));
                }
                Err(error) => {
                    let text = error.to_string();
                    let named = format!("the scheme {scheme:?} of {url:?} is not supported");
                    assert!(text.starts_with(&named), "{text}");
                    assert!(text.contains(&format!("--features {scheme},")), "{text}");
                }
            }
        }
    }

    #[test]
    fn other_texts_are_directories_or_refused() {
        assert_eq!(parse("run/1".into()).unwrap(), Place::Directory("run/1".into()));
        for text in ["ftp://b/run", "file:///run", "~/run", ""] {
            assert!(parse(text.into()).is_err(), "{text}");
        }
    }
}
