//! Job keys: ids of jobs as safe file names.

use sha2::{Digest, Sha256};

use super::Launcher;

/// The longest job key: a prefix, a separator and an id.
pub(super) const JOB_KEY_BYTES_MAX: usize = PREFIX_BYTES_MAX + 1 + ID_BYTES_MAX;

/// Returns the file name of a job.
///
/// The prefix makes `..` and names that begin with a dot impossible, and keeps jobs of different
/// launchers apart.
pub(super) fn job_key(launcher: Launcher, id: &str) -> String {
    let prefix = launcher.key_prefix();
    if id.len() <= ID_BYTES_MAX && id.chars().all(is_safe) {
        return format!("{prefix}-{id}");
    }
    // The readable part is for a person who lists the folder; the digest tells ids apart.
    let readable: String = id.chars().filter(|&c| is_safe(c)).take(READABLE_BYTES).collect();
    let digest = Sha256::digest(id);
    let digest = digest[..DIGEST_BYTES].iter().map(|byte| format!("{byte:02x}"));
    format!("{prefix}-{readable}-{}", digest.collect::<String>())
}

fn is_safe(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}

const PREFIX_BYTES_MAX: usize = 8;
/// The address of a socket has at most 107 bytes, and the folder is a part of it.
const ID_BYTES_MAX: usize = 48;
/// The bytes of the digest in a key: too many for a chosen collision.
const DIGEST_BYTES: usize = 16;
const READABLE_BYTES: usize = ID_BYTES_MAX - 1 - 2 * DIGEST_BYTES;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn unsafe_ids_end_in_their_digest() {
        let long = "7".repeat(65);
        let table = [
            ("1092026369", "open-mpi-1092026369"),
            ("prterun-vm-11773@1", "open-mpi-prterun-vm-1177-266371efd78eb6d7c88edcb50160ca3b"),
            ("", "open-mpi-"),
            ("..", "open-mpi-.."),
            ("../../etc", "open-mpi-....etc-74ccf3c5b4c19a8167f9a3d1dd63e0e4"),
            ("/", "open-mpi--8a5edab282632443219e051e4ade2d1d"),
            ("a\0b", "open-mpi-ab-59b271ae1bbcb1d31d41929817f4b16f"),
            ("é\n", "open-mpi--edd3a863872a04239eb29ad4bc12fc89"),
            (&long, "open-mpi-777777777777777-6ba0f16fdb8b246d729ad9820527106b"),
        ];
        for (id, expected) in table {
            assert_eq!(job_key(Launcher::OpenMpi, id), expected, "{id:?}");
        }
        assert_ne!(job_key(Launcher::OpenMpi, "a@1"), job_key(Launcher::OpenMpi, "a1@"));
    }

    proptest! {
        #[test]
        fn every_key_is_one_short_path_component(id in ".{0,200}") {
            for launcher in [Launcher::OpenMpi, Launcher::Torchrun, Launcher::Slurm] {
                let key = job_key(launcher, &id);
                prop_assert!(key.len() <= JOB_KEY_BYTES_MAX);
                prop_assert!(key.chars().all(is_safe) && !key.starts_with('.'));
                let components: Vec<_> = std::path::Path::new(&key).components().collect();
                prop_assert_eq!(components.len(), 1);
            }
        }
    }
}
