//! The text form of a cluster: `ps=host:port,host:port;worker=1@host:port,3@host:port`.
//!
//! Jobs are separated by `;`, tasks by `,`. In a sparse job each task is `index@address`. The
//! canonical text sorts jobs by name and tasks by index, and writes a dense job without indices.

use std::fmt;
use std::str::FromStr;

use super::error::clip;
use super::json::read_index;
use super::{ClusterError, ClusterSpec, is_dense};

/// Writes the canonical text; the empty cluster is the empty text.
impl fmt::Display for ClusterSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, (name, job)) in self.jobs.iter().enumerate() {
            let separator = if position > 0 { ";" } else { "" };
            write!(f, "{separator}{name}=")?;
            let dense = is_dense(job);
            for (position, (index, address)) in job.iter().enumerate() {
                let separator = if position > 0 { "," } else { "" };
                match dense {
                    true => write!(f, "{separator}{address}")?,
                    false => write!(f, "{separator}{index}@{address}")?,
                }
            }
        }
        Ok(())
    }
}

/// Reads the text form. Jobs and indexed tasks may be in any order.
impl FromStr for ClusterSpec {
    type Err = ClusterError;

    fn from_str(text: &str) -> Result<ClusterSpec, ClusterError> {
        if text.len() > ClusterSpec::TEXT_BYTES_MAX {
            return Err(ClusterError::TooLong { bytes: text.len() });
        }
        let mut builder = ClusterSpec::builder();
        let mut position = 0;
        for job in text.split(';').filter(|_| !text.is_empty()) {
            let (name, tasks) = job
                .split_once('=')
                .ok_or_else(|| ClusterError::Text { position, text: clip(job) })?;
            builder = builder.sparse_job(name, read_tasks(name, tasks)?);
            position += job.len() + 1;
        }
        builder.build()
    }
}

fn read_tasks<'a>(job: &str, text: &'a str) -> Result<Vec<(u32, &'a str)>, ClusterError> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let entries: Vec<_> = text.split(',').map(split_index).collect();
    if entries.iter().any(|(index, _)| index.is_some() != entries[0].0.is_some()) {
        return Err(ClusterError::Mixed { job: clip(job) });
    }
    (0u32..)
        .zip(entries)
        .map(|(position, (index, address))| match index {
            Some(index) => Ok((read_index(job, index)?, address)),
            None => Ok((position, address)),
        })
        .collect()
}

/// Splits `3@host:port`. Only digits make an index, because a socket's path may contain an `@`.
fn split_index(entry: &str) -> (Option<&str>, &str) {
    match entry.split_once('@') {
        Some((index, address)) if index.bytes().all(|byte| byte.is_ascii_digit()) => {
            (Some(index), address)
        }
        _ => (None, entry),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_canonical_text_is_sorted() {
        let table = [
            ("", ""),
            ("ps=", "ps="),
            ("worker=c:1;ps=a:1,b:1", "ps=a:1,b:1;worker=c:1"),
            ("ps=1@b:1,0@a:1", "ps=a:1,b:1"),
            ("ps=10@b:1,9@a:1", "ps=9@a:1,10@b:1"),
            ("ps=unix:/run/a@b,[::1]:5", "ps=unix:/run/a@b,[::1]:5"),
            ("ps=007@a:1", "ps=7@a:1"),
        ];
        for (text, expected) in table {
            let cluster: ClusterSpec = text.parse().unwrap();
            assert_eq!(cluster.to_string(), expected);
        }
    }

    #[test]
    fn faults_name_a_position_or_a_job() {
        let table = [
            (
                "ps=a:1;worker",
                "cannot read the cluster at byte 7: expected job=address,..., found \"worker\"",
            ),
            ("ps=a:1;", "cannot read the cluster at byte 7: expected job=address,..., found \"\""),
            (
                "ps=a:1,2@b:1",
                "cannot read the job \"ps\": either every task has an index or none has",
            ),
            ("ps=@a:1", "cannot number a task of job ps \"\": an index is a number below 1048576"),
            (
                "ps=99999999999@a:1",
                "cannot number a task of job ps \"99999999999\": \
                 an index is a number below 1048576",
            ),
        ];
        for (text, expected) in table {
            assert_eq!(text.parse::<ClusterSpec>().unwrap_err().to_string(), expected, "{text}");
        }
        assert!("ps=a:1,".parse::<ClusterSpec>().is_err());
        assert!("ps=a:1, b:1".parse::<ClusterSpec>().is_err());
    }

    proptest! {
        #[test]
        fn both_forms_round_trip(
            jobs in proptest::collection::btree_map(
                "[a-z][a-z0-9_]{0,4}",
                proptest::collection::btree_set(0u32..40, 0..6),
                0..4,
            ),
        ) {
            let mut port = 0;
            let mut builder = ClusterSpec::builder();
            for (name, indices) in &jobs {
                let tasks: Vec<_> = indices.iter().map(|&index| {
                    port += 1;
                    (index, format!("host:{port}"))
                }).collect();
                builder = builder.sparse_job(name, tasks);
            }
            let cluster = builder.build().unwrap();
            prop_assert_eq!(&cluster.to_string().parse::<ClusterSpec>().unwrap(), &cluster);
            prop_assert_eq!(&ClusterSpec::from_json(&cluster.to_json()).unwrap(), &cluster);
        }

        #[test]
        fn no_text_panics(text in "[a-z0-9=;,@:\\[\\]/é ]{0,40}") {
            if let Ok(cluster) = text.parse::<ClusterSpec>() {
                prop_assert_eq!(cluster.to_string().parse::<ClusterSpec>(), Ok(cluster));
            }
        }
    }
}
