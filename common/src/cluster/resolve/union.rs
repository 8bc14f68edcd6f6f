//! [`union`]: one cluster of several.

use std::collections::BTreeMap;

use super::ResolveError;
use crate::cluster::{ClusterSpec, is_dense};

/// Unites clusters job by job, as `UnionResolver` of TensorFlow does.
///
/// Tasks of a job that several clusters number from 0 are numbered on in the order of the
/// clusters. If one of them has explicit indices, the tasks keep their indices.
///
/// # Errors
/// [`ResolveError::TaskTwice`] if two clusters have the same task of such a job, and
/// [`ResolveError::Cluster`] if the union is no valid cluster.
#[doc(alias = "tf.distribute.cluster_resolver.UnionResolver")]
pub fn union<'a>(
    clusters: impl IntoIterator<Item = &'a ClusterSpec>,
) -> Result<ClusterSpec, ResolveError> {
    let mut parts: BTreeMap<&str, Vec<&super::super::Job>> = BTreeMap::new();
    for cluster in clusters {
        for (name, job) in &cluster.jobs {
            parts.entry(name).or_default().push(job);
        }
    }
    let mut builder = ClusterSpec::builder();
    for (name, jobs) in parts {
        if jobs.iter().all(|job| is_dense(job)) {
            builder = builder.job(name, jobs.iter().flat_map(|job| job.values().map(|a| &**a)));
            continue;
        }
        let mut tasks = BTreeMap::new();
        for (&index, address) in jobs.into_iter().flatten() {
            if tasks.insert(index, &**address).is_some() {
                return Err(ResolveError::TaskTwice { job: name.to_owned(), index });
            }
        }
        builder = builder.sparse_job(name, tasks);
    }
    let variable = "the union of clusters".to_owned();
    builder.build().map_err(|cause| ResolveError::Cluster { variable, cause })
}
