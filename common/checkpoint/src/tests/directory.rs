//! A real directory: its modes, the names it refuses, and an export that other programs can read.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;

use pushpull_common::error::Chain;
use safetensors::SafeTensors;

use super::samples::{SLOTS, check_restored, element, place, save, variables};
use crate::{
    CheckpointError, CheckpointStorage, LocalDirectory, Retention, export, list, newest_good,
    retain,
};

fn open(path: &Path) -> Arc<dyn CheckpointStorage> {
    Arc::new(LocalDirectory::create(path).unwrap())
}

#[test]
fn a_directory_keeps_checkpoints_private() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("deep/checkpoints");
    let storage = open(&path);
    let catalogue = place(variables(2), 2, 1);
    for step in [1, 2, 3] {
        let published = save(&storage, &catalogue, step).unwrap();
        let retention = Retention { max_to_keep: 2, ..Retention::default() };
        retain(&*storage, &published, &retention).unwrap();
    }
    let mut folders = storage.list(None).unwrap();
    folders.sort();
    assert_eq!(folders, ["ckpt-1-2", "ckpt-1-3"]);
    let mode = |path: &Path| path.metadata().unwrap().mode() & 0o777;
    assert_eq!((mode(&path), mode(&path.join("ckpt-1-3"))), (0o700, 0o700));
    for file in storage.list(Some("ckpt-1-3")).unwrap() {
        assert_eq!(mode(&path.join("ckpt-1-3").join(file)), 0o600);
    }
    let (mut opened, _) = newest_good(&open(&path)).unwrap().unwrap();
    check_restored(&mut opened, &place(variables(3), 1, 2), &SLOTS, 3);
    // A checkpoint that is deleted while it is open can be read to its end.
    storage.remove_folder("ckpt-1-3").unwrap();
    check_restored(&mut opened, &place(variables(1), 1, 1), &SLOTS, 3);
}

#[test]
fn no_name_or_link_leads_out_of_a_directory() {
    let temporary = tempfile::tempdir().unwrap();
    let inside = temporary.path().join("in");
    let outside = temporary.path().join("out");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "secret").unwrap();
    let storage = open(&inside);
    storage.create_folder("real").unwrap();
    symlink(&outside, inside.join("link")).unwrap();
    symlink(outside.join("file"), inside.join("real/link")).unwrap();
    fs::create_dir(inside.join("real/folder")).unwrap();
    let long = "n".repeat(65);
    for folder in ["link", "..", ".", "", "a/b", "../out", ".hidden", "a\0", "ü", &long] {
        assert!(storage.open(folder, "file").is_err(), "{folder}");
        assert!(storage.create(folder, "new").is_err(), "{folder}");
        assert!(storage.list(Some(folder)).is_err() && storage.remove_folder(folder).is_err());
        assert!(storage.sync(Some(folder)).is_err() || folder == "real");
    }
    for file in ["link", "folder", "../../out/file", "", "/etc/passwd", &long] {
        assert!(storage.open("real", file).is_err(), "{file}");
        assert!(storage.create("real", file).is_err(), "{file}");
    }
    assert!(storage.open("real", "absent").unwrap_err().is_not_found());
    assert_eq!(fs::read(outside.join("file")).unwrap(), b"secret");
    fs::set_permissions(&inside, fs::Permissions::from_mode(0o770)).unwrap();
    let error = Chain(&LocalDirectory::open(&inside).unwrap_err()).to_string();
    assert!(error.contains("its mode 770 lets others write"), "{error}");
    assert!(LocalDirectory::open(temporary.path().join("absent")).unwrap_err().is_not_found());
}

#[test]
fn a_removed_directory_is_created_again_and_a_replaced_one_is_used() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("checkpoints");
    let storage = open(&path);
    let catalogue = place(variables(2), 2, 1);
    save(&storage, &catalogue, 1).unwrap();
    fs::remove_dir_all(&path).unwrap();
    save(&storage, &catalogue, 2).unwrap();
    assert_eq!(storage.list(None).unwrap(), ["ckpt-1-2"]);
    assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
    fs::remove_dir_all(&path).unwrap();
    fs::create_dir(&path).unwrap();
    save(&storage, &catalogue, 3).unwrap();
    // A directory that was only opened is not created again.
    let opened_only: Arc<dyn CheckpointStorage> = Arc::new(LocalDirectory::open(&path).unwrap());
    assert_eq!(opened_only.list(None).unwrap(), ["ckpt-1-3"]);
    fs::remove_dir_all(&path).unwrap();
    assert!(opened_only.list(None).unwrap_err().is_not_found() && !path.exists());
    // A file is not a directory, and every operation checks the directory's permissions.
    fs::write(&path, "no directory").unwrap();
    let error = Chain(&save(&storage, &catalogue, 4).unwrap_err()).to_string();
    assert!(error.contains(&path.display().to_string()), "{error}");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
    let error = Chain(&save(&storage, &catalogue, 4).unwrap_err()).to_string();
    assert!(error.contains("lets others write"), "{error}");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    save(&storage, &catalogue, 4).unwrap();
}

/// As text, 1002 is before 802.
#[test]
fn checkpoints_are_listed_by_their_steps() {
    let temporary = tempfile::tempdir().unwrap();
    let storage = open(temporary.path());
    let catalogue = place(variables(1), 1, 1);
    for step in [98, 802, 1002] {
        save(&storage, &catalogue, step).unwrap();
    }
    fs::create_dir(temporary.path().join("ckpt-1-90")).unwrap();
    fs::create_dir(temporary.path().join("ckpt-1-1100")).unwrap();
    let listed = list(&*storage).unwrap();
    let names: Vec<&str> = listed.checkpoints.iter().map(|saved| &*saved.name).collect();
    assert_eq!(names, ["ckpt-1-1002", "ckpt-1-802", "ckpt-1-98"]);
    let refused: Vec<&str> = listed.refused.iter().map(|refused| &*refused.checkpoint).collect();
    assert_eq!(refused, ["ckpt-1-1100", "ckpt-1-90"]);
    let (opened, _) = newest_good(&storage).unwrap().unwrap();
    assert_eq!(opened.manifest().checkpoint.global_step, 1002);
}

#[test]
fn a_path_with_a_scheme_is_refused() {
    for error in [
        LocalDirectory::create("s3://bucket/run").unwrap_err(),
        LocalDirectory::open("s3://bucket/run").unwrap_err(),
    ] {
        assert_eq!(error.source.kind(), std::io::ErrorKind::Unsupported);
        let expected = "the scheme \"s3\" of \"s3://bucket/run\" is not supported";
        assert!(Chain(&error).to_string().contains(expected), "{error}");
    }
    let temporary = tempfile::tempdir().unwrap();
    let storage = open(temporary.path());
    save(&storage, &place(variables(1), 1, 1), 1).unwrap();
    let error = export(storage, None, Path::new("gs://bucket/x"), false).unwrap_err();
    assert!(Chain(&error).to_string().contains("the scheme \"gs\" of"), "{error}");
    assert!(!Path::new("s3:").exists() && !Path::new("gs:").exists());
}

/// It may be sound: its storage may answer again.
#[test]
fn a_checkpoint_that_cannot_be_read_is_not_passed_over() {
    let temporary = tempfile::tempdir().unwrap();
    let storage = open(temporary.path());
    for step in [1, 6] {
        save(&storage, &place(variables(1), 1, 1), step).unwrap();
    }
    let manifest = temporary.path().join("ckpt-1-6/MANIFEST");
    fs::remove_file(&manifest).unwrap();
    let (opened, refused) = newest_good(&storage).unwrap().unwrap();
    assert_eq!((opened.manifest().checkpoint.global_step, refused.len()), (1, 1));
    fs::create_dir(&manifest).unwrap();
    let error = newest_good(&storage).unwrap_err();
    assert!(matches!(error, CheckpointError::Storage(_)), "{error}");
}

#[test]
fn the_folder_of_one_checkpoint_is_no_directory_of_checkpoints() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().canonicalize().unwrap();
    save(&open(&path), &place(variables(1), 1, 1), 60).unwrap();
    let folder = path.join("ckpt-1-60");
    let expected =
        format!("it is the folder of one checkpoint: give its parent, {}", path.display());
    for opened in [LocalDirectory::create(&folder), LocalDirectory::open(&folder)] {
        let error = Chain(&opened.unwrap_err()).to_string();
        assert!(error.ends_with(&expected) && error.contains("ckpt-1-60"), "{error}");
    }
    LocalDirectory::open_read_only(&folder).unwrap();
    LocalDirectory::open(&path).unwrap();
}

#[test]
fn an_export_into_a_checkpoint_or_a_state_is_refused() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().canonicalize().unwrap();
    let storage = open(&path.join("saved"));
    save(&storage, &place(variables(1), 1, 1), 60).unwrap();
    let [shard, state] = ["state/shard-0", "state"].map(|folder| path.join(folder));
    fs::create_dir_all(&shard).unwrap();
    fs::write(shard.join("control"), "").unwrap();
    let checkpoint = path.join("saved/ckpt-1-60");
    let before = fs::read_dir(&checkpoint).unwrap().count();
    symlink(checkpoint.join("MANIFEST"), path.join("link")).unwrap();
    for (to, folder, kind) in [
        (checkpoint.join("MANIFEST"), &checkpoint, "the folder of a checkpoint"),
        (checkpoint.join("new.safetensors"), &checkpoint, "the folder of a checkpoint"),
        (path.join("link"), &checkpoint, "the folder of a checkpoint"),
        (shard.join("control"), &shard, "the state directory of a server"),
        (state.join("new.safetensors"), &state, "the state directory of a server"),
    ] {
        let error = Chain(&export(storage.clone(), None, &to, false).unwrap_err()).to_string();
        let expected = format!("{} is {kind}, and a file in it may be replaced", folder.display());
        assert!(error.contains(&expected), "{error}");
    }
    assert_eq!(fs::read_dir(&checkpoint).unwrap().count(), before);
    newest_good(&storage).unwrap().unwrap();
    // Beside the checkpoints.
    export(storage, None, &path.join("saved/model.safetensors"), false).unwrap();
}

#[test]
fn an_export_replaces_files_alone() {
    let temporary = tempfile::tempdir().unwrap();
    let storage = open(&temporary.path().join("checkpoints"));
    save(&storage, &place(variables(1), 1, 1), 1).unwrap();
    let to = |name| temporary.path().join(name);
    let socket = std::os::unix::net::UnixListener::bind(to("socket")).unwrap();
    fs::create_dir(to("folder")).unwrap();
    for name in ["socket", "folder"] {
        let error = export(storage.clone(), None, &to(name), false).unwrap_err();
        assert!(Chain(&error).to_string().contains("it is no file"), "{error}");
    }
    drop(socket);
    // The file at the end of a link is replaced, and the link stays.
    fs::write(to("file"), "before").unwrap();
    std::os::unix::fs::symlink("file", to("link")).unwrap();
    export(storage, None, &to("link"), false).unwrap();
    assert!(fs::symlink_metadata(to("link")).unwrap().is_symlink());
    assert!(SafeTensors::deserialize(&fs::read(to("file")).unwrap()).is_ok());
}

#[test]
fn an_export_follows_the_safetensors_format() {
    let temporary = tempfile::tempdir().unwrap();
    let storage = open(&temporary.path().join("checkpoints"));
    // The omitted last variable has the name that another one's slot has in an export.
    let catalogue = place(variables(3)[..6].to_vec(), 2, 1);
    save(&storage, &catalogue, 1).unwrap();
    save(&storage, &catalogue, 6).unwrap();
    let to = temporary.path().join("model.safetensors");
    fs::write(temporary.path().join(".model.safetensors.part"), "left by a crash").unwrap();
    let mut plain = 0;
    for (checkpoint, slots, step) in [(Some("ckpt-1-1"), false, 1), (None, true, 6)] {
        export(storage.clone(), checkpoint, &to, slots).unwrap();
        let bytes = fs::read(&to).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().as_ref().unwrap();
        let found =
            ["format", "checkpoint", "global_step", "restore_epoch"].map(|key| &*metadata[key]);
        assert_eq!(found, ["pt", &format!("ckpt-1-{step}"), &step.to_string(), "1"]);
        plain += tensors.len();
        for variable in catalogue.variables() {
            let streams = if slots && variable.is_trainable() { &SLOTS[..] } else { &[] };
            for stream in std::iter::once(&"values").chain(streams) {
                let name = match *stream {
                    "values" => variable.name().to_owned(),
                    slot => format!("{}:{slot}", variable.name()),
                };
                let tensor = tensors.tensor(&name).unwrap();
                let extents: Vec<u64> = tensor.shape().iter().map(|&e| e as u64).collect();
                assert_eq!(extents, variable.shape().extents());
                let size = variable.dtype().size();
                let elements = 0..variable.shape().elements();
                let expected: Vec<u8> = elements
                    .flat_map(|i| element(variable.name(), stream, i, step, size))
                    .collect();
                assert_eq!(tensor.data(), expected, "{name}");
                assert_eq!((tensor.data().as_ptr() as usize - bytes.as_ptr() as usize) % size, 0);
            }
        }
    }
    assert_eq!(plain, 6 + 6 + 2 * 4, "four variables are trained");
    // A shard's own file is in the safetensors format too.
    let shard = temporary.path().join("checkpoints/ckpt-1-6/shard-0-0.safetensors");
    assert!(SafeTensors::deserialize(&fs::read(shard).unwrap()).is_ok());
    let names = fs::read_dir(temporary.path()).unwrap().count();
    assert_eq!(names, 2, "no partial file is left");
}

#[test]
fn a_failed_export_leaves_the_existing_file() {
    let temporary = tempfile::tempdir().unwrap();
    let storage = open(&temporary.path().join("checkpoints"));
    let to = temporary.path().join("out.safetensors");
    fs::write(&to, "before").unwrap();
    assert!(export(storage.clone(), None, &to, false).is_err(), "there is no checkpoint");
    let twins = |names: [&str; 2]| {
        let f32s = |name| pushpull_common::variable::VariableSpec::f32(name, [1]).unwrap();
        place(names.map(f32s).to_vec(), 1, 1)
    };
    save(&storage, &twins(["w", "w:m"]), 1).unwrap();
    save(&storage, &twins(["w", "__metadata__"]), 2).unwrap();
    for (checkpoint, slots, expected) in [
        ("ckpt-1-1", true, "\"w:m\" would be the name of two"),
        ("ckpt-1-2", false, "\"__metadata__\" would be the name of two"),
        ("ckpt-1-3", false, "cannot open"),
        ("../ckpt-1-1", false, "cannot find the checkpoint \"../ckpt-1-1\""),
    ] {
        let exported = export(storage.clone(), Some(checkpoint), &to, slots);
        let error = Chain(&exported.unwrap_err()).to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(fs::read(&to).unwrap(), b"before");
    assert!(!temporary.path().join(".out.safetensors.part").exists());
    export(storage, Some("ckpt-1-1"), &to, false).unwrap();
}
