//! Paths that name no file of this machine: URLs of a storage, such as `s3://bucket/run`, texts that
//! a shell has not expanded, such as `~/run`, and the empty path.

use std::io;
use std::path::Path;

use thiserror::Error;

/// A path begins with the scheme of a URL. As a path it would name a folder such as `s3:` in the
/// working directory.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the scheme {scheme:?} of {path:?} is not supported: {advice}")]
pub struct UnsupportedScheme {
    /// The scheme, such as `s3`.
    pub scheme: String,
    /// The path.
    pub path: String,
    /// Advice on the path to give instead.
    advice: String,
}

/// Returns the path if it names a file or a folder of this machine.
///
/// A path with a scheme is refused: letters, digits, `+`, `-` and `.`, a colon and a slash. That
/// includes `file`, because a URL escapes characters that a path has. So is any other first part
/// with a colon and two slashes, such as a URL in quotes. A folder with such a name can be given as
/// `./s3:/run`.
///
/// An empty path is refused, and so is one whose first part is `~` or begins with the name of a
/// variable, such as `$HOME` or `${HOME}`: a shell expands these only outside of quotes. A folder
/// with such a name can be given as `./~`.
///
/// # Errors
/// [`UnsupportedScheme`], in an error of the kind `Unsupported`; an error of the kind `InvalidInput`
/// for the other paths.
pub fn check(path: &Path) -> io::Result<&Path> {
    if path.as_os_str().is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path is empty"));
    }
    if let Some(part) = unexpanded(path) {
        let text = path.to_string_lossy();
        let why = format!(
            "{part:?} of {text:?} was not expanded by a shell: give the whole path, or ./{text} for \
             this name"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    match scheme(path) {
        None => Ok(path),
        Some(scheme) => {
            let path = path.to_string_lossy().into_owned();
            let advice = match scheme.eq_ignore_ascii_case("file") {
                true => "give the path alone".to_owned(),
                false => "mount the storage, and give the path where it is mounted".to_owned(),
            };
            let error = UnsupportedScheme { scheme, path, advice };
            Err(io::Error::new(io::ErrorKind::Unsupported, error))
        }
    }
}

/// Returns the first part of a path if a shell would have replaced it.
fn unexpanded(path: &Path) -> Option<String> {
    let text = path.as_os_str().to_string_lossy();
    let first = text.split('/').next()?;
    let is_variable = first.strip_prefix('$').is_some_and(|name| {
        let begins = |c: char| c.is_ascii_alphabetic() || matches!(c, '_' | '{');
        name.starts_with(begins)
    });
    (first == "~" || is_variable).then(|| first.to_owned())
}

/// Returns the scheme with which a path begins.
fn scheme(path: &Path) -> Option<String> {
    let text = path.as_os_str().to_string_lossy();
    let (scheme, rest) = text.split_once(":/")?;
    if rest.starts_with('/') && !scheme.contains('/') {
        return Some(scheme.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned());
    }
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    let begins = scheme.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic());
    (begins && scheme.bytes().all(is_inner)).then(|| scheme.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_with_a_scheme_are_refused() {
        for (path, scheme) in [
            ("s3://bucket/run", "s3"),
            ("S3A://b", "S3A"),
            ("hdfs:///run", "hdfs"),
            ("hdfs:/run", "hdfs"),
            ("gs://", "gs"),
            ("git+ssh://h/x", "git+ssh"),
            ("a.b-c1://x", "a.b-c1"),
            ("file:///tmp/run", "file"),
            ("x://y", "x"),
            ("\"s3://bucket/run\"", "s3"),
            (" s3://b", "s3"),
            ("[s3://b]", "s3"),
            ("s3_a://b", "s3_a"),
            ("1s3://x", "1s3"),
            ("://x", ""),
        ] {
            let error = check(Path::new(path)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Unsupported);
            let inner = error.get_ref().and_then(|inner| inner.downcast_ref()).unwrap();
            let UnsupportedScheme { scheme: found, path: named, .. } = inner;
            assert_eq!((found.as_str(), named.as_str()), (scheme, path));
        }
        let text = |path| check(Path::new(path)).unwrap_err().to_string();
        assert_eq!(
            text("s3://bucket/run"),
            "the scheme \"s3\" of \"s3://bucket/run\" is not supported: mount the storage, and give \
             the path where it is mounted"
        );
        assert!(text("FILE:///tmp").ends_with("is not supported: give the path alone"));
    }

    #[test]
    fn paths_that_no_shell_has_expanded_are_refused() {
        for (path, part) in [
            ("~", "~"),
            ("~/ck", "~"),
            ("$HOME/ck", "$HOME"),
            ("${HOME}/ck", "${HOME}"),
            ("$_run", "$_run"),
        ] {
            let error = check(Path::new(path)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{path}");
            let text = error.to_string();
            let expected = format!("{part:?} of {path:?} was not expanded by a shell: ");
            assert!(text.starts_with(&expected), "{text}");
            assert!(text.ends_with(&format!("or ./{path} for this name")), "{text}");
        }
        let error = check(Path::new("")).unwrap_err();
        assert_eq!(
            (error.kind(), &*error.to_string()),
            (io::ErrorKind::InvalidInput, "the path is empty")
        );
    }

    #[test]
    fn other_paths_are_taken() {
        for path in [
            "~backup/x",
            "./~/x",
            "/~/$HOME",
            "$",
            "$1/x",
            "C$/x",
            "run",
            "/mnt/s3://x",
            "./s3:/run",
            "s3:",
            "a:b",
            "1s3:/x",
            "a b:/x",
            "a/b://",
            "/a b://x",
        ] {
            assert_eq!(check(Path::new(path)).unwrap(), Path::new(path));
        }
    }
}
