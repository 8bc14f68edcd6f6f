//! [`NcclLibrary`]: the functions of NCCL, found at run time, and the types of its interface.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

use cudarc::driver::sys::CUstream;
use libloading::Library;

use super::nccl_error::NcclError;

/// The file names of the library; the first that is found counts. Packages for users have the first
/// alone.
const LIBRARIES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The results of calls that are no failures.
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// An error of the library itself.
pub(super) const INTERNAL_ERROR: c_int = 3;

/// The unique id of a communicator: one rank makes it, and every rank joins with it.
///
/// Its 128 bytes hold an address of the process that made it, and let their holder join. They travel
/// in any way, for example by a broadcast around a ring.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct NcclId([u8; NcclId::BYTES]);

impl NcclId {
    /// The size of an id in bytes.
    pub const BYTES: usize = 128;

    /// Restores an id from the bytes of [`NcclId::as_bytes`].
    pub fn from_bytes(bytes: [u8; NcclId::BYTES]) -> NcclId {
        NcclId(bytes)
    }

    /// Returns the bytes of the id.
    pub fn as_bytes(&self) -> &[u8; NcclId::BYTES] {
        &self.0
    }
}

/// Writes no bytes, because an id lets others join.
impl fmt::Debug for NcclId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclId").finish_non_exhaustive()
    }
}

/// The settings of a communicator, an `ncclConfig_t` of version 2.14. A newer library reads `size`
/// bytes of it and takes its defaults for the rest.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Settings {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl Settings {
    /// Settings of a communicator whose calls return at once, and are then polled.
    pub(super) const NON_BLOCKING: Settings =
        Settings { size: size_of::<Settings>(), magic: 0xcafe_beef, version: 21_400, blocking: 0 };
}

/// A communicator of the library, an `ncclComm_t`.
pub(super) type Communicator = *mut c_void;

type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetUniqueId = unsafe extern "C" fn(*mut NcclId) -> c_int;
type OfCommunicator = unsafe extern "C" fn(Communicator) -> c_int;
type GetAsyncError = unsafe extern "C" fn(Communicator, *mut c_int) -> c_int;
type InitRankConfig = unsafe extern "C" fn(
    communicator: *mut Communicator,
    size: c_int,
    id: NcclId,
    rank: c_int,
    settings: *const Settings,
) -> c_int;
type Reduce = unsafe extern "C" fn(
    from: u64,
    to: u64,
    count: usize,
    element: c_int,
    reduction: c_int,
    communicator: Communicator,
    stream: CUstream,
) -> c_int;
type Broadcast = unsafe extern "C" fn(
    from: u64,
    to: u64,
    count: usize,
    element: c_int,
    root: c_int,
    communicator: Communicator,
    stream: CUstream,
) -> c_int;
type AllGather = unsafe extern "C" fn(
    from: u64,
    to: u64,
    count: usize,
    element: c_int,
    communicator: Communicator,
    stream: CUstream,
) -> c_int;

/// The functions of the library, which stays loaded.
///
/// cudarc has bindings too, and they are not used. Its loader never tries `libnccl.so.2`, the only
/// name that packages for users have, and panics if it finds nothing. The results of its functions
/// are an enum of one version, and other versions return other codes, which no enum may hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct NcclLibrary {
    get_version: GetVersion,
    get_unique_id: GetUniqueId,
    pub(super) init_rank_config: InitRankConfig,
    pub(super) get_async_error: GetAsyncError,
    pub(super) finalize: OfCommunicator,
    pub(super) destroy: OfCommunicator,
    pub(super) abort: OfCommunicator,
    pub(super) all_reduce: Reduce,
    pub(super) reduce_scatter: Reduce,
    pub(super) broadcast: Broadcast,
    pub(super) all_gather: AllGather,
}

impl NcclLibrary {
    /// Opens the library once for the whole process. The result does not change: the library stays
    /// loaded, and so does a refusal.
    pub(super) fn open() -> Result<&'static NcclLibrary, NcclError> {
        static LIBRARY: OnceLock<Result<NcclLibrary, NcclError>> = OnceLock::new();
        LIBRARY.get_or_init(NcclLibrary::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<NcclLibrary, NcclError> {
        // SAFETY: The library is NVIDIA's, found by the system; what it runs when it is loaded is
        // trusted as the driver is.
        let load = |name: &&str| unsafe { Library::new(*name) }.ok();
        let library = LIBRARIES.iter().find_map(load);
        let library = library.ok_or(NcclError::NotLoaded { tried: &LIBRARIES })?;
        // SAFETY: Each field has the type of that function in the library's interface, which has
        // been the same in all versions since 2.14. Addresses of devices are passed as numbers of
        // the size of a pointer.
        let functions = unsafe {
            NcclLibrary {
                get_version: find(&library, "ncclGetVersion")?,
                get_unique_id: find(&library, "ncclGetUniqueId")?,
                init_rank_config: find(&library, "ncclCommInitRankConfig")?,
                get_async_error: find(&library, "ncclCommGetAsyncError")?,
                finalize: find(&library, "ncclCommFinalize")?,
                destroy: find(&library, "ncclCommDestroy")?,
                abort: find(&library, "ncclCommAbort")?,
                all_reduce: find(&library, "ncclAllReduce")?,
                reduce_scatter: find(&library, "ncclReduceScatter")?,
                broadcast: find(&library, "ncclBroadcast")?,
                all_gather: find(&library, "ncclAllGather")?,
            }
        };
        std::mem::forget(library);
        Ok(functions)
    }

    /// Returns the version as one number: 10000 for the major, 100 for the minor one.
    pub(super) fn version(&self) -> Result<u32, NcclError> {
        let mut version = 0;
        // SAFETY: The function writes one number, for which there is room.
        match unsafe { (self.get_version)(&mut version) } {
            SUCCESS => Ok(version.max(0) as u32),
            code => Err(NcclError::failed("tell the version", code)),
        }
    }

    /// Makes the id of a new communicator.
    pub(super) fn unique_id(&self) -> Result<NcclId, NcclError> {
        let mut id = NcclId([0; NcclId::BYTES]);
        // SAFETY: The function writes one id, for which there is room.
        match unsafe { (self.get_unique_id)(&mut id) } {
            SUCCESS => Ok(id),
            code => Err(NcclError::failed("make an id", code)),
        }
    }
}

/// Returns a function of the library.
///
/// # Safety
/// `F` is the type of the function. It is used only while the library is loaded.
unsafe fn find<F: Copy>(library: &Library, function: &'static str) -> Result<F, NcclError> {
    // SAFETY: The caller guarantees the type.
    let found = unsafe { library.get::<F>(function.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| NcclError::Lacks { function })
}
