//! URLs of storages: their parts, and which are refused.

use std::fmt;
use std::str::FromStr;

use crate::fault::RemoteError;

/// The kind of a storage, as the scheme of its URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RemoteScheme {
    /// Amazon S3, or another store of its protocol: `s3://bucket/prefix`.
    S3,
    /// Google Cloud Storage: `gs://bucket/prefix`.
    Gs,
    /// Azure Blob Storage: `az://container/prefix`.
    Az,
    /// Hadoop's file system: `hdfs://namenode:port/path`.
    Hdfs,
}

impl RemoteScheme {
    /// All kinds.
    pub const ALL: [RemoteScheme; 4] =
        [RemoteScheme::S3, RemoteScheme::Gs, RemoteScheme::Az, RemoteScheme::Hdfs];

    /// Returns the scheme, which is also the name of the feature.
    pub fn name(self) -> &'static str {
        match self {
            RemoteScheme::S3 => "s3",
            RemoteScheme::Gs => "gs",
            RemoteScheme::Az => "az",
            RemoteScheme::Hdfs => "hdfs",
        }
    }

    /// Returns whether this build has the feature of this kind.
    pub fn is_built(self) -> bool {
        match self {
            RemoteScheme::S3 => cfg!(feature = "s3"),
            RemoteScheme::Gs => cfg!(feature = "gs"),
            RemoteScheme::Az => cfg!(feature = "az"),
            RemoteScheme::Hdfs => cfg!(feature = "hdfs"),
        }
    }
}

/// The URL of a folder on a storage. Its parts need no escapes: an authority of letters, digits,
/// `.`, `_`, `-` and `:`, and names of printable characters other than `?`, `#`, `%` and `\`.
#[derive(Clone, PartialEq, Eq)]
pub struct RemoteUrl {
    scheme: RemoteScheme,
    /// The bucket, the container, or the NameNode with its port.
    authority: String,
    /// The names of the path.
    segments: Vec<String>,
}

impl RemoteUrl {
    /// Returns the kind of the storage.
    pub fn scheme(&self) -> RemoteScheme {
        self.scheme
    }

    /// Returns the bucket, the container, or the NameNode with its port.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Returns the path without a slash at either end; empty for the root.
    pub fn path(&self) -> String {
        self.segments.join("/")
    }

    /// Returns whether a text begins with the scheme of a storage and `://`, in any case.
    pub fn is_remote(text: &str) -> bool {
        text.split_once("://").is_some_and(|(scheme, _)| scheme_of(scheme).is_some())
    }
}

impl fmt::Display for RemoteUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme.name(), self.authority)?;
        self.segments.iter().try_for_each(|segment| write!(f, "/{segment}"))
    }
}

impl fmt::Debug for RemoteUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl FromStr for RemoteUrl {
    type Err = RemoteError;

    fn from_str(text: &str) -> Result<RemoteUrl, RemoteError> {
        let fault = |reason| RemoteError::Url { url: without_user(text), reason };
        let schemes = "it must begin with s3://, gs://, az:// or hdfs://";
        let (scheme, rest) = text.split_once("://").ok_or_else(|| fault(schemes))?;
        let scheme = scheme_of(scheme).ok_or_else(|| fault(schemes))?;
        if rest.contains('@') {
            return Err(fault("a URL has no user and no password: they are settings"));
        }
        if rest.contains(['?', '#']) {
            return Err(fault("a URL has no query and no fragment: they are settings"));
        }
        if rest.len() > PATH_BYTES_MAX {
            return Err(fault("it has more than 900 bytes"));
        }
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let is_authority = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:".contains(&byte);
        match authority.is_empty() {
            true if scheme == RemoteScheme::Hdfs => return Err(fault("it names no NameNode")),
            true => return Err(fault("it names no bucket")),
            false if authority.bytes().all(is_authority) => {}
            false => return Err(fault("its bucket or host has a character that none can have")),
        }
        let mut segments = Vec::new();
        for segment in path.split('/').filter(|segment| !segment.is_empty()) {
            if segment.chars().any(|c| c.is_control() || matches!(c, '%' | '\\')) {
                return Err(fault("its path has a control character, % or \\"));
            }
            if matches!(segment, "." | "..") {
                return Err(fault("its path has . or .. as a name"));
            }
            segments.push(segment.to_owned());
        }
        Ok(RemoteUrl { scheme, authority: authority.to_owned(), segments })
    }
}

fn scheme_of(text: &str) -> Option<RemoteScheme> {
    RemoteScheme::ALL.into_iter().find(|scheme| text.eq_ignore_ascii_case(scheme.name()))
}

/// Returns a URL for an error, without the user and the password that it may contain.
fn without_user(text: &str) -> String {
    match (text.find("://"), text.rfind('@')) {
        (Some(scheme), Some(at)) if scheme < at => {
            let query = text[at..].find(['?', '#']).map_or(text.len(), |query| at + query);
            format!("{}***{}", &text[..scheme + 3], &text[at..query])
        }
        _ => text.split(['?', '#']).next().unwrap_or_default().to_owned(),
    }
}

/// The longest authority with a path, in bytes. Keys of object stores have at most 1024, of which
/// folder and file take the rest.
const PATH_BYTES_MAX: usize = 900;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_have_a_scheme_an_authority_and_a_path() {
        for (text, authority, path, shown) in [
            ("s3://b/run/1", "b", "run/1", "s3://b/run/1"),
            ("S3://b", "b", "", "s3://b"),
            ("gs://my.bucket_x//a///b/", "my.bucket_x", "a/b", "gs://my.bucket_x/a/b"),
            ("az://c/läufe x", "c", "läufe x", "az://c/läufe x"),
            ("hdfs://nn:8020/user/run", "nn:8020", "user/run", "hdfs://nn:8020/user/run"),
        ] {
            let url: RemoteUrl = text.parse().unwrap();
            assert_eq!(
                (url.authority(), &*url.path(), &*url.to_string()),
                (authority, path, shown)
            );
            assert!(RemoteUrl::is_remote(text), "{text}");
        }
    }

    #[test]
    fn other_urls_are_refused_without_their_secrets() {
        for (text, shown, reason) in [
            ("b/run", "b/run", "must begin with"),
            ("ftp://b/run", "ftp://b/run", "must begin with"),
            ("s3://", "s3://", "names no bucket"),
            ("s3:///run", "s3:///run", "names no bucket"),
            ("hdfs:///run", "hdfs:///run", "names no NameNode"),
            ("s3://key:secret@b/run?x=y", "s3://***@b/run", "no user and no password"),
            ("az://c/run?sig=secret", "az://c/run", "no query"),
            ("s3://b/run#x", "s3://b/run", "no query"),
            ("s3://b c/run", "s3://b c/run", "a character that none can have"),
            ("s3://b/a/../c", "s3://b/a/../c", ". or .."),
            ("s3://b/a%20c", "s3://b/a%20c", "a control character"),
        ] {
            let error = text.parse::<RemoteUrl>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("cannot use {shown:?}: ")), "{error}");
            assert!(error.contains(reason) && !error.contains("secret"), "{error}");
        }
        let long = format!("s3://b/{}", "x".repeat(900));
        assert!(long.parse::<RemoteUrl>().unwrap_err().to_string().contains("more than 900"));
        assert!(!RemoteUrl::is_remote("file:///x") && !RemoteUrl::is_remote("s3:/x"));
    }
}
