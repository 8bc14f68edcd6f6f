//! The interface of an object store, and how one is opened.

use std::sync::Arc;

use object_store::ObjectStore;
use object_store::multipart::MultipartStore;

/// An object store that uploads in parts. Its uploads have identifiers, so that another process can
/// abort those of a killed one.
pub(crate) trait Bucket: ObjectStore + MultipartStore {}

impl<T: ObjectStore + MultipartStore> Bucket for T {}

/// A shared [`Bucket`].
pub(crate) type SharedBucket = Arc<dyn Bucket>;
