//! Sharded checkpoints, as Hugging Face writes them, and hostile ones.

use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

use super::*;

const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";

/// Writes a file with tensors of one `f32` each.
fn write(path: &Path, tensors: &[&str]) {
    let bytes = 1.5_f32.to_le_bytes();
    let views =
        tensors.iter().map(|name| (*name, TensorView::new(Dtype::F32, vec![1], &bytes).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A folder with `a` and `b` in one file, `c` in another, and this index.
fn sharded(index: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join(FIRST), &["a", "b"]);
    write(&folder.path().join(SECOND), &["c"]);
    fs::write(folder.path().join(INDEX_FILE), index).unwrap();
    folder
}

/// The text of an index with these entries.
fn index(entries: &[(&str, &str)]) -> String {
    let entries = entries.iter().map(|(tensor, file)| format!("{tensor:?}: {file:?}"));
    let entries = entries.collect::<Vec<_>>().join(", ");
    format!("{{\"metadata\": {{\"total_size\": 12}}, \"weight_map\": {{{entries}}}}}")
}

fn sound() -> String {
    index(&[("a", FIRST), ("b", FIRST), ("c", SECOND)])
}

fn names(files: &TensorFiles) -> Vec<&str> {
    files.names().collect()
}

#[test]
fn a_sharded_checkpoint_is_opened_by_its_folder_or_its_index() {
    let folder = sharded(&sound());
    for path in [folder.path().to_owned(), folder.path().join(INDEX_FILE)] {
        let files = TensorFiles::open(&path, false).unwrap();
        assert_eq!(names(&files), ["a", "b", "c"]);
        let c = files.tensor("c").unwrap();
        assert_eq!((c.name(), c.path()), ("c", folder.path().join(SECOND)));
        assert_eq!(c.read(0..1, DType::F32).unwrap(), 1.5_f32.to_le_bytes());
        assert!(files.tensor("d").is_none());
    }
    // One file with the whole model comes first, as in other programs.
    write(&folder.path().join(WHOLE_FILE), &["whole"]);
    assert_eq!(names(&TensorFiles::open(folder.path(), false).unwrap()), ["whole"]);
}

/// Caches of downloads consist of links out of the folder.
#[test]
fn files_may_be_links_and_below_folders() {
    let folder = sharded(&index(&[("a", FIRST), ("b", FIRST), ("c", "parts/c.safetensors")]));
    let outside = tempfile::tempdir().unwrap();
    write(&outside.path().join("blob"), &["c"]);
    fs::create_dir(folder.path().join("parts")).unwrap();
    let link = folder.path().join("parts/c.safetensors");
    std::os::unix::fs::symlink(outside.path().join("blob"), &link).unwrap();
    let files = TensorFiles::open(folder.path(), false).unwrap();
    assert_eq!(names(&files), ["a", "b", "c"]);
    fs::remove_file(outside.path().join("blob")).unwrap();
    let error = TensorFiles::open(folder.path(), false).unwrap_err().to_string();
    assert!(error.contains("parts/c.safetensors\": No such file"), "{error}");
}

#[test]
fn a_tensor_that_the_index_does_not_name_is_extra() {
    let folder = sharded(&index(&[("a", FIRST), ("c", SECOND)]));
    let error = TensorFiles::open(folder.path(), false).unwrap_err().to_string();
    let expected = format!("{FIRST:?} has the tensor \"b\", and its weight_map does not say so");
    assert!(error.contains(&expected), "{error}");
    assert_eq!(names(&TensorFiles::open(folder.path(), true).unwrap()), ["a", "c"]);
}

#[test]
fn hostile_indices_are_refused() {
    let of = |file: &str| index(&[("a", FIRST), ("b", FIRST), ("c", file)]);
    let many: Vec<String> = (0..513).map(|file| format!("{file}.safetensors")).collect();
    let many: Vec<_> = many.iter().map(|file| (file.as_str(), file.as_str())).collect();
    let outside = |file: &str| {
        (of(file), format!("names {file:?} for the tensor \"c\": a file must be in its folder"))
    };
    let deep = format!("{{\"weight_map\": {}", "[".repeat(100_000));
    let twice = index(&[("a", FIRST), ("b", FIRST), ("c", SECOND), ("a", SECOND)]);
    let two_maps = format!("{{\"weight_map\": {{}}, {}", &sound()[1..]);
    let mut cases = vec![
        (String::new(), "it is empty".to_owned()),
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n".to_owned(),
            "it is a pointer of Git LFS".to_owned(),
        ),
        ("{\"a\": 1}".to_owned(), "it is invalid: missing field `weight_map`".to_owned()),
        ("{\"weight_map\": {\"a\": 7}}".to_owned(), "it is invalid: invalid type".to_owned()),
        ("{\"weight_map\": [\"a\"]}".to_owned(), "expected an object".to_owned()),
        (sound() + "]", "it is invalid: trailing characters".to_owned()),
        (deep, "it is invalid".to_owned()),
        (two_maps, "duplicate field `weight_map`".to_owned()),
        (twice, "its weight_map repeats the tensor \"a\"".to_owned()),
        (index(&many), "its weight_map names 513 files: the limit is 512".to_owned()),
        (
            index(&[("a", FIRST), ("b", SECOND), ("c", SECOND)]),
            format!("{FIRST:?} has the tensor \"b\", and its weight_map does not say so"),
        ),
        (
            index(&[("a", FIRST), ("b", FIRST), ("c", SECOND), ("d", SECOND)]),
            format!("names {SECOND:?} for the tensor \"d\", which is not there"),
        ),
    ];
    for file in ["", ".", "..", "../c.safetensors", "/c.safetensors", "parts/../../c", "./c"] {
        cases.push(outside(file));
    }
    for (text, expected) in cases {
        let folder = sharded(&text);
        let error = TensorFiles::open(folder.path(), false).unwrap_err();
        assert!(matches!(error, LoadError::Index { .. }), "{expected}: {error}");
        assert!(error.to_string().contains(&expected), "{expected}: {error}");
        assert!(error.to_string().contains(INDEX_FILE), "{error}");
    }
}

#[test]
fn a_long_index_is_refused_before_it_is_parsed() {
    let folder = sharded("");
    let file = fs::File::create(folder.path().join(INDEX_FILE)).unwrap();
    file.set_len((64 << 20) + 1).unwrap();
    let error = TensorFiles::open(folder.path(), false).unwrap_err().to_string();
    assert!(error.contains("it has more than 67108864 bytes, the limit"), "{error}");
}

/// The error names the file of the checkpoint, and what it is.
#[test]
fn a_damaged_file_of_a_checkpoint_is_named() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n";
    for (bytes, expected) in [
        (None, "No such file"),
        (Some(&pointer[..]), "as a safetensors file: it is a pointer of Git LFS"),
        (Some(b"{}"), "as a safetensors file: it is JSON"),
    ] {
        let folder = sharded(&sound());
        let path = folder.path().join(SECOND);
        match bytes {
            None => fs::remove_file(&path).unwrap(),
            Some(bytes) => fs::write(&path, bytes).unwrap(),
        }
        let error = TensorFiles::open(folder.path(), false).unwrap_err().to_string();
        assert!(error.contains(SECOND) && error.contains(expected), "{error}");
    }
}

#[test]
fn nothing_panics_on_an_index_with_another_byte() {
    let sound = sound();
    for place in 0..sound.len() {
        let mut bytes = sound.clone().into_bytes();
        bytes[place] ^= 1 << (place % 8);
        let folder = sharded("");
        fs::write(folder.path().join(INDEX_FILE), bytes).unwrap();
        let _ = TensorFiles::open(folder.path(), false);
        fs::write(folder.path().join(INDEX_FILE), &sound[..place]).unwrap();
        assert!(TensorFiles::open(folder.path(), false).is_err(), "cut at {place}");
    }
}
