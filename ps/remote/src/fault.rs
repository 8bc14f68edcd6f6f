//! Errors of storages: their kind, and their texts without secrets.

use std::error::Error;
use std::fmt;
use std::io;
use std::time::Duration;

use pushpull_checkpoint::StorageFault;
use thiserror::Error;

/// The reason why a storage cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// The URL is malformed.
    #[error("cannot use {url:?}: {reason}")]
    Url {
        /// The URL, without user, password and query.
        url: String,
        /// The reason.
        reason: &'static str,
    },
    /// The program was built without the feature of this kind of storage.
    #[error("cannot use {url:?}: this program was built without the feature {feature:?}")]
    NotBuilt {
        /// The URL.
        url: String,
        /// The feature.
        feature: &'static str,
    },
    /// A setting is invalid, or one is missing.
    #[error("cannot use {url:?}: {reason}")]
    Setting {
        /// The URL.
        url: String,
        /// The setting and the reason, without its value if that is a secret.
        reason: String,
    },
    /// The threads of the storage could not be started.
    #[error("cannot start the threads of {url:?}")]
    Threads {
        /// The URL.
        url: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The storage did not answer, or refuses its use.
    #[error(transparent)]
    Storage(StorageFault),
}

/// The cause of a failed operation on a storage, as the source of a [`StorageFault`].
#[derive(Debug, Error)]
#[error("{text}")]
pub struct RemoteFault {
    text: String,
}

/// A failed request, before the operation and its path are known.
#[derive(Clone, Debug)]
pub(crate) struct StoreError {
    pub(crate) kind: io::ErrorKind,
    pub(crate) text: String,
    /// Whether the store certainly did nothing and may answer later, such as a NameNode in safe
    /// mode.
    #[cfg_attr(not(feature = "hdfs"), expect(dead_code))]
    pub(crate) is_retriable: bool,
}

impl StoreError {
    pub(crate) fn new(kind: io::ErrorKind, text: impl fmt::Display) -> StoreError {
        StoreError { kind, text: text.to_string(), is_retriable: false }
    }

    /// Returns the error of an operation that did not end in time.
    pub(crate) fn timed_out(limit: Duration, last: Option<&StoreError>) -> StoreError {
        let seconds = limit.as_secs_f64();
        let text = match last {
            None => format!("no answer within {seconds} s"),
            Some(last) => {
                format!("not done within {seconds} s; the last answer was: {}", last.text)
            }
        };
        StoreError::new(io::ErrorKind::TimedOut, text)
    }

    pub(crate) fn is_not_found(&self) -> bool {
        self.kind == io::ErrorKind::NotFound
    }

    pub(crate) fn already_exists(text: impl fmt::Display) -> StoreError {
        StoreError::new(io::ErrorKind::AlreadyExists, text)
    }

    pub(crate) fn not_found(text: impl fmt::Display) -> StoreError {
        StoreError::new(io::ErrorKind::NotFound, text)
    }

    pub(crate) fn invalid(text: impl fmt::Display) -> StoreError {
        StoreError::new(io::ErrorKind::InvalidInput, text)
    }

    pub(crate) fn into_io(self) -> io::Error {
        io::Error::new(self.kind, RemoteFault { text: self.text })
    }
}

impl From<object_store::Error> for StoreError {
    fn from(error: object_store::Error) -> StoreError {
        use object_store::Error as Store;
        let text = one_line(&error);
        let kind = match &error {
            // A bucket that does not exist is not found either, and the text tells which it is.
            Store::NotFound { .. } => io::ErrorKind::NotFound,
            Store::AlreadyExists { .. } => io::ErrorKind::AlreadyExists,
            Store::PermissionDenied { .. } | Store::Unauthenticated { .. } => {
                io::ErrorKind::PermissionDenied
            }
            Store::Precondition { .. } => io::ErrorKind::InvalidData,
            Store::InvalidPath { .. } => io::ErrorKind::InvalidInput,
            Store::NotSupported { .. } | Store::NotImplemented { .. } => io::ErrorKind::Unsupported,
            // The answer to a listing has no kind of its own: the bucket is missing, or denied.
            _ if text.contains("404 Not Found") => io::ErrorKind::NotFound,
            _ if text.contains("403 Forbidden") || text.contains("401 Unauthorized") => {
                io::ErrorKind::PermissionDenied
            }
            _ if text.contains("timed out") || text.contains("deadline") => io::ErrorKind::TimedOut,
            _ => io::ErrorKind::Other,
        };
        StoreError::new(kind, explained(text))
    }
}

/// Returns the text of an error with its causes, in one line, without the queries of URLs: that of
/// a shared access signature is a secret.
pub(crate) fn one_line(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        // Most errors of the store display their cause already.
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut line = words.into_iter().map(without_query).collect::<Vec<_>>().join(" ");
    if line.len() > TEXT_BYTES_MAX {
        let end = (0..=TEXT_BYTES_MAX).rev().find(|&end| line.is_char_boundary(end)).unwrap_or(0);
        line.truncate(end);
        line.push_str(" ...");
    }
    line
}

/// Adds advice to the errors that name a cause which people do not look for.
fn explained(text: String) -> String {
    match text.contains("RequestTimeTooSkewed") {
        true => format!("the clock of this machine differs from that of the store: {text}"),
        false => text,
    }
}

/// Removes the query of a URL from a word of a text.
fn without_query(word: &str) -> String {
    match (word.find("://"), word.find('?')) {
        (Some(scheme), Some(query)) if scheme < query => {
            let rest = &word[query..];
            let end = rest.find([')', '"', '\'', '<', '>', ',']).unwrap_or(rest.len());
            format!("{}?***{}", &word[..query], &rest[end..])
        }
        _ => word.to_owned(),
    }
}

/// The longest text of an error. A store may answer a whole page of HTML.
const TEXT_BYTES_MAX: usize = 600;

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: text.into() }
    }

    #[test]
    fn texts_have_one_line_and_no_query() {
        let text = StoreError::from(generic(
            "Error performing PUT http://h:1/b/k?sv=1&sig=abc%3D in 2s,\n  after 3 retries\n",
        ))
        .text;
        assert_eq!(
            text,
            "Generic S3 error: Error performing PUT http://h:1/b/k?*** in 2s, after 3 retries"
        );
        let text = StoreError::from(generic("url (http://h/k?sig=abc)")).text;
        assert_eq!(text, "Generic S3 error: url (http://h/k?***)");
        let text = StoreError::from(generic(&"ü".repeat(9000))).text;
        assert!(text.len() < 610 && text.ends_with(" ..."), "{text}");
    }

    #[test]
    fn kinds_follow_the_answer() {
        let source = || "x".into();
        let path = || "k".to_owned();
        for (error, kind) in [
            (object_store::Error::NotFound { path: path(), source: source() }, "NotFound"),
            (
                object_store::Error::Unauthenticated { path: path(), source: source() },
                "PermissionDenied",
            ),
            (generic("HTTP error: operation timed out"), "TimedOut"),
            (generic("503 Slow Down"), "Other"),
        ] {
            assert_eq!(format!("{:?}", StoreError::from(error).kind), kind);
        }
        let skewed = StoreError::from(generic("<Code>RequestTimeTooSkewed</Code>"));
        assert!(skewed.text.starts_with("the clock of this machine differs"), "{}", skewed.text);
    }
}
