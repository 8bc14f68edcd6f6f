//! First values: set one by one, and loaded from files.

use std::sync::Arc;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::tensor::{DType, Shape, bf16, f16};
use pushpull_common::variable::VariableSpec;
use safetensors::tensor::{Dtype, TensorView};

use super::*;
use crate::error::LoadError;

fn plan() -> ShardingPlan {
    let variables = ["a", "b"].map(|name| VariableSpec::f32(name, [3]).unwrap()).to_vec();
    let map = ShardMap::new([0], 1).unwrap();
    let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
    ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()))
}

#[test]
fn values_are_padded_and_later_ones_replace_earlier_ones() {
    let plan = plan();
    let mut initial_values = InitialValues::new(&plan);
    initial_values.set("b", &[9.0_f32; 3]).set("b", &[1.0_f32, 2.0, 3.0]);
    let values = initial_values.finish().unwrap().dense;
    let expected: Vec<u8> = [1.0_f32, 2.0, 3.0, 0.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    assert_eq!(values.len(), 1);
    assert_eq!(values[&VariableId(1)], expected);
}

#[test]
fn the_first_error_is_returned() {
    let plan = plan();
    let mut initial_values = InitialValues::new(&plan);
    initial_values.set("a", &[1.0_f32; 3]).set("a", &[1.0_f32; 4]).set("x", &[1.0_f32]);
    let name = "a".to_owned();
    let shape = plan.catalogue().variable(VariableId(0)).shape();
    let shape = shape.to_string();
    assert_eq!(
        initial_values.finish().unwrap_err(),
        ViewError::Length { name, elements: 4, shape }.into()
    );
}

/// Two f32 vectors of 3, one variable for each of the other types, and a sparse one.
fn typed_plan() -> ShardingPlan {
    let shape = |extents: &[u64]| Shape::new(extents).unwrap();
    let variable = |name, dtype| VariableSpec::new(name, dtype, shape(&[1, 3])).unwrap();
    let variables = vec![
        variable("f32", DType::F32),
        variable("f64", DType::F64),
        variable("f16", DType::F16),
        variable("bf16", DType::Bf16),
        VariableSpec::new("i64", DType::I64, Shape::scalar()).unwrap().plain(),
        VariableSpec::f32("rows", [9, 2]).unwrap().sparse(),
    ];
    let map = ShardMap::new([0], 1).unwrap();
    let placement = Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).unwrap();
    ShardingPlan::new(Arc::new(Catalogue::new(variables, &placement).unwrap()))
}

/// A tensor of a file: name, type, shape and bytes.
type Tensor = (&'static str, Dtype, &'static [usize], Vec<u8>);

fn tensors() -> Vec<Tensor> {
    let bytes = |count: usize, first: u8| (first..).take(count).collect::<Vec<u8>>();
    vec![
        ("f32", Dtype::F32, &[1, 3], bytes(12, 10)),
        ("f64", Dtype::F64, &[1, 3], bytes(24, 30)),
        ("f16", Dtype::F16, &[1, 3], bytes(6, 60)),
        ("bf16", Dtype::BF16, &[1, 3], bytes(6, 70)),
        ("i64", Dtype::I64, &[], bytes(8, 80)),
        ("rows", Dtype::F32, &[9, 2], bytes(72, 90)),
    ]
}

/// Writes tensors with the crate of the format.
fn file_of(tensors: &[Tensor]) -> Vec<u8> {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// Loads a file of these bytes, and returns its dense variables.
fn loaded(bytes: &[u8], options: &LoadOptions) -> Result<BTreeMap<VariableId, Bytes>, LoadError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    loaded_from(file.path(), options)
}

/// Loads this file, and returns its dense variables.
fn loaded_from(
    path: &Path,
    options: &LoadOptions,
) -> Result<BTreeMap<VariableId, Bytes>, LoadError> {
    let plan = typed_plan();
    let mut initial_values = InitialValues::new(&plan);
    initial_values.load_with(path, options);
    initial_values.finish().map(|tensors| tensors.dense).map_err(|error| match error {
        Error::Load(error) => error,
        other => panic!("{other}"),
    })
}

#[test]
fn a_file_fills_the_variables_of_its_names() {
    let values = loaded(&file_of(&tensors()), &LoadOptions::new()).unwrap();
    assert_eq!(values.len(), 5);
    for (id, (name, _, _, bytes)) in tensors().into_iter().enumerate().take(5) {
        let loaded = &values[&VariableId(id as u32)];
        assert_eq!(&loaded[..bytes.len()], bytes, "{name}");
        assert_eq!(loaded.len(), bytes.len().next_multiple_of(8), "{name}");
        assert!(loaded[bytes.len()..].iter().all(|padding| *padding == 0), "{name}");
    }
}

#[test]
fn options_rename_and_leave_out() {
    let mut renamed = tensors();
    renamed[1].0 = "model.double";
    renamed.remove(3);
    renamed.push(("other", Dtype::U8, &[2], vec![1, 2]));
    let bytes = file_of(&renamed);
    let options = LoadOptions::new().rename("f64", "model.double");
    let error = loaded(&bytes, &options).unwrap_err();
    assert!(matches!(&error, LoadError::Missing { variable, .. } if variable == "bf16"), "{error}");
    let options = options.allow_missing(true);
    let error = loaded(&bytes, &options).unwrap_err();
    assert!(matches!(&error, LoadError::Extra { tensor, .. } if tensor == "other"), "{error}");
    let values = loaded(&bytes, &options.clone().allow_extra(true)).unwrap();
    assert_eq!(values.keys().map(|id| id.0).collect::<Vec<_>>(), [0, 1, 2, 4]);
    let error = loaded(&bytes, &options.rename("nobody", "other")).unwrap_err();
    assert!(
        matches!(&error, LoadError::Rename { variable, .. } if variable == "nobody"),
        "{error}"
    );
}

#[test]
fn elements_are_cast_by_option() {
    let halves =
        |values: &[f32]| values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
    let brains =
        |values: &[f32]| values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
    let singles = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let doubles = |values: &[f64]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let mut changed = tensors();
    changed[0] = ("f32", Dtype::BF16, &[1, 3], brains(&[1.0, -2.5, f32::INFINITY]));
    changed[1] = ("f64", Dtype::F16, &[1, 3], halves(&[0.5, -0.0, 65_504.0]));
    changed[2] = ("f16", Dtype::F64, &[1, 3], doubles(&[1.0, 0.1, f64::NAN]));
    changed[3] = ("bf16", Dtype::F32, &[1, 3], singles(&[1.0, 1.003_906_3, -3e38]));
    let cast = LoadOptions::new().cast(true);
    let values = loaded(&file_of(&changed), &cast).unwrap();
    let found = |id: u32, bytes: usize| values[&VariableId(id)][..bytes].to_vec();
    assert_eq!(found(0, 12), singles(&[1.0, -2.5, f32::INFINITY]));
    assert_eq!(found(1, 24), doubles(&[0.5, -0.0, 65_504.0]));
    let expected: Vec<u8> = halves(&[1.0, 0.1, f32::NAN]);
    assert_eq!(found(2, 6), expected);
    let expected: Vec<u8> = brains(&[1.0, 1.003_906_3, -3e38]);
    assert_eq!(found(3, 6), expected);
    assert_eq!(values[&VariableId(3)].len(), 8);
    let error = loaded(&file_of(&changed), &LoadOptions::new()).unwrap_err();
    assert!(matches!(error, LoadError::Type { .. }), "{error}");
    // What is finite stays finite, and integers are not cast.
    changed[2] = ("f16", Dtype::F32, &[1, 3], singles(&[1.0, 65_520.0, 2.0]));
    let error = loaded(&file_of(&changed), &cast).unwrap_err().to_string();
    assert!(
        error.contains("element 1 of the tensor \"f16\" is 65520, beyond the range of f16"),
        "{error}"
    );
    changed[2] = ("f16", Dtype::I64, &[1, 3], vec![0; 24]);
    let error = loaded(&file_of(&changed), &cast).unwrap_err();
    assert!(matches!(error, LoadError::Type { .. }), "{error}");
}

#[test]
fn a_tensor_that_does_not_fit_is_named() {
    for (index, other, expected) in [
        (
            0,
            ("f32", Dtype::F64, &[1, 3][..], 24),
            "\"f32\" has elements of F64, and \"f32\" of f32",
        ),
        (1, ("f64", Dtype::U8, &[1, 3], 3), "\"f64\" has elements of U8, and \"f64\" of f64"),
        (2, ("f16", Dtype::BF16, &[1, 3], 6), "has elements of BF16, and \"f16\" of f16"),
        (0, ("f32", Dtype::F32, &[3, 1], 12), "is [3, 1], and that of \"f32\" is [1, 3]"),
        (0, ("f32", Dtype::F32, &[3], 12), "is [3], and that of \"f32\" is [1, 3]"),
        (4, ("i64", Dtype::I64, &[1], 8), "is [1], and that of \"i64\" is []"),
        (3, ("other", Dtype::F32, &[9, 2], 72), "no tensor \"bf16\" for the variable \"bf16\""),
        (5, ("rows", Dtype::F32, &[2, 9], 72), "is [2, 9], and that of \"rows\" is [9, 2]"),
        (5, ("rows", Dtype::F16, &[9, 2], 36), "has elements of F16, and \"rows\" of f32"),
        (5, ("others", Dtype::F32, &[9, 2], 72), "no tensor \"rows\" for the variable \"rows\""),
    ] {
        let mut changed = tensors();
        let (name, dtype, shape, bytes) = other;
        changed[index] = (name, dtype, shape, vec![0; bytes]);
        let error = loaded(&file_of(&changed), &LoadOptions::new()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// A file of this header, with a length of its own choice.
fn raw(length: u64, header: &str, data: usize) -> Vec<u8> {
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn hostile_files_are_refused() {
    let header = |info: &str| format!("{{\"f32\":{info}}}");
    let of = |info: &str, data| raw(header(info).len() as u64, &header(info), data);
    let deep = format!("{{\"f32\":{}", "[".repeat(100_000));
    let wrap = "{\"dtype\":\"F32\",\"shape\":[4611686018427387905,4],\"data_offsets\":[0,16]}";
    let far = "{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[12,24]}";
    let backwards = "{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[12,0]}";
    let huge = "{\"dtype\":\"F32\",\"shape\":[9223372036854775807],\"data_offsets\":[0,18446744073709551615]}";
    let fits = "{\"dtype\":\"F32\",\"shape\":[1,3],\"data_offsets\":[0,12]}";
    let twice = format!("{{\"f32\":{fits},\"f32\":{}}}", fits.replace("[0,12]", "[12,24]"));
    let whole = file_of(&tensors());
    let mut files = vec![
        (Vec::new(), "it is empty"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n".to_vec(),
            "it is a pointer of Git LFS",
        ),
        (b"PK\x03\x04\x14\0\0\0\0\0".to_vec(), "it is a zip archive, as NPZ and PyTorch files are"),
        (b"\x80\x02}q\0X\x06\0\0\0weight".to_vec(), "it is a pickle of Python"),
        (b"{\"weight_map\": {\"f32\": \"model-1.safetensors\"}}".to_vec(), "it is JSON"),
        (raw(twice.len() as u64, &twice, 24), "its header repeats the tensor \"f32\""),
        (vec![0; 7], "it has 7 bytes"),
        (
            raw(u64::MAX, "{}", 0),
            "its header has 18446744073709551615 bytes, and 2 are behind its length",
        ),
        (raw(100_000_001, "{}", 0), "its header has 100000001 bytes, and 2 are behind its length"),
        (raw(3, "{}", 0), "its header has 3 bytes, and 2 are behind its length"),
        (raw(0, "", 0), "its header is invalid"),
        (raw(4, "\u{feff}{", 0), "its header is invalid"),
        (raw(deep.len() as u64, &deep, 0), "its header is invalid"),
        (
            of(wrap, 16),
            "\"f32\" of F32 and shape [4611686018427387905, 4] has more bytes than can be",
        ),
        (of(far, 24), "its tensor \"f32\" begins at byte 12 of the elements, expected 0"),
        (
            of(backwards, 12),
            "its tensor \"f32\" of F32 and shape [0] has 0 bytes, and its data_offsets are 12 to 0",
        ),
        (of(huge, 12), "its tensor \"f32\" of F32 and shape [9223372036854775807] has more bytes"),
        (
            of(&fits.replace("[1,3]", "[1,4]"), 12),
            "its tensor \"f32\" of F32 and shape [1, 4] has 16 bytes, and its data_offsets are 0 to 12",
        ),
        (of("{\"dtype\":\"F32\",\"shape\":[3]}", 12), "its tensor \"f32\" has no data_offsets"),
        (of(&fits.replace("[1,3]", "[-1]"), 12), "its tensor \"f32\" has [-1] as its shape"),
        (of(&fits.replace("[0,12]", "[0]"), 12), "\"f32\" has [0] as its data_offsets"),
        (of("[]", 0), "its tensor \"f32\" has no dtype"),
        (
            of(fits, 11),
            "it has 11 bytes of elements, and its header describes 12: the tensor \"f32\" is cut",
        ),
        (b"{\"a\": {\"b\": [1, 2, 3]}}".to_vec(), "it is JSON"),
        (of(fits, 13), "it has 13 bytes of elements, and its header describes 12"),
        (
            of("{\"dtype\":\"F7\",\"shape\":[],\"data_offsets\":[0,4]}", 4),
            "\"f32\" has elements of \"F7\"",
        ),
    ];
    files.push((whole[..whole.len() - 1].to_vec(), ": the tensor \"f16\" is cut"));
    for (bytes, expected) in files {
        let error = loaded(&bytes, &LoadOptions::new()).unwrap_err();
        assert!(matches!(error, LoadError::Format { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{expected}: {error}");
    }
    // Every file that is cut or has another bit in its header fails or loads; nothing panics.
    for cut in 0..whole.len() {
        assert!(loaded(&whole[..cut], &LoadOptions::new()).is_err(), "{cut}");
    }
    for byte in 0..whole.len() - 128 {
        let mut changed = whole.clone();
        changed[byte] ^= 1 << (byte % 8);
        let _ = loaded(&changed, &LoadOptions::new());
    }
}

/// The file has as many bytes as it says, so only the limit keeps this from taking memory for them.
#[test]
fn a_header_beyond_the_limit_is_refused_before_it_is_read() {
    for length in [100_000_001, 1 << 31] {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), raw(length, "{\"f32\":{", 0)).unwrap();
        // The rest is a hole, which takes no space on the disk.
        file.as_file().set_len(8 + length + 12).unwrap();
        let error = loaded_from(file.path(), &LoadOptions::new()).unwrap_err();
        assert!(matches!(error, LoadError::Format { .. }), "{error}");
        let expected = format!("its header has {length} bytes: the limit is 100000000");
        assert!(error.to_string().contains(&expected), "{error}");
    }
}

#[test]
fn a_path_without_a_file_is_an_error() {
    let plan = typed_plan();
    let folder = tempfile::tempdir().unwrap();
    for (path, expected) in [
        (folder.path().join("absent"), "No such file"),
        ("hdfs:///models/w".into(), "the scheme \"hdfs\" of \"hdfs:///models/w\" is not supported"),
        ("/dev/null".into(), "it is a device, expected a regular file"),
        (folder.path().to_owned(), "no model.safetensors and no model.safetensors.index.json"),
    ] {
        let mut initial_values = InitialValues::new(&plan);
        initial_values.load(&path);
        let error = initial_values.finish().unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(path.to_str().unwrap()), "{error}");
    }
}
